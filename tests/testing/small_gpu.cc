// Lets a test into which it is linked run as on a GPU whose thread blocks have 99 KB of shared
// memory (compute capability 8.6, 8.9 and 12.0). Kernels choose the tiles for those GPUs, and a
// kernel that asks for more shared memory ends the test.
#include "burst/kernels/gpu/common/shared_memory.h"

namespace burst {
namespace {

[[maybe_unused]] const bool limited = [] {
  cuda::LimitSharedMemory(99 << 10);
  return true;
}();

}  // namespace
}  // namespace burst
