// Definitions that make libburst.so one file that loads anywhere.
//
// Debian's static archives of Abseil are compiled for programs. A member with thread_local
// variables cannot be linked into a shared library. Or it makes a library that needs room in every
// thread's static block, which a running process may not have. Two such members are needed: Cord
// (for a Status's payloads, which nothing here has) and sysinfo. With the definitions below the
// linker leaves both out. //tests/c:library_test fails if another Abseil needs others.
#include <absl/base/config.h>
#include <absl/base/internal/sysinfo.h>
#include <absl/strings/cord.h>
#include <absl/strings/internal/cordz_info.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

namespace absl {
ABSL_NAMESPACE_BEGIN

void Cord::DestroyCordSlow() { std::abort(); }
bool Cord::EqualsImpl(const Cord&, size_t) const { std::abort(); }
Cord::operator std::string() const { std::abort(); }
void Cord::InlineRep::UnrefTree() { std::abort(); }

namespace cord_internal {
void CordzInfo::MaybeTrackCordImpl(InlineData&, const InlineData&, MethodIdentifier) {
  std::abort();
}
}  // namespace cord_internal

namespace base_internal {
double NominalCPUFrequency() { return 1.0; }
int NumCPUs() { return static_cast<int>(std::thread::hardware_concurrency()); }
pid_t GetTID() { return static_cast<pid_t>(syscall(SYS_gettid)); }
pid_t GetCachedTID() {
  static thread_local const pid_t id = GetTID();
  return id;
}
}  // namespace base_internal

ABSL_NAMESPACE_END
}  // namespace absl
