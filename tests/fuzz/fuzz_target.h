// A fuzz target is one function that takes any bytes. Its file NAME_fuzz.cc is linked twice:
//
//   NAME_replay_test  with replay_test.cc: a GoogleTest that feeds it corpus/NAME and mutations of
//                     the corpus, with any compiler
//   NAME_fuzz         with libfuzzer.cc: libFuzzer, by --config=fuzz (clang, asan, ubsan)
#pragma once

#include <cstddef>
#include <cstdint>

namespace burst {

// Checks the target's properties by BURST_CHECK, whatever the bytes are. No exception may leave it.
void FuzzOne(const uint8_t* data, size_t size);

}  // namespace burst
