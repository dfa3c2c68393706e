// Functions that the reader and the writers of safetensors files share.
#pragma once

#include <xxhash.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "burst/tensor/tensor.h"

namespace burst {

inline constexpr char kMetadata[] = "__metadata__";
inline constexpr char kHeaderChecksum[] = "xxh3", kTensorChecksum[] = "xxh3:";
// Marks the checksum in a header's text. Inside of another string its quotes would be escaped.
inline constexpr char kHeaderChecksumText[] = "\"xxh3\":\"";
inline constexpr char kNoDigits[] = "0000000000000000";

inline std::string Digits(XXH64_hash_t hash) {
  return absl::StrCat(absl::Hex(uint64_t{hash}, absl::kZeroPad16));
}

// Returns the format's name of a dtype.
inline const char* SafetensorsName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kFloat64:
      return "F64";
    case DType::kInt32:
      return "I32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
    case DType::kFloat8E4M3:
      return "F8_E4M3";
    case DType::kFloat8E5M2:
      return "F8_E5M2";
  }
  return "";
}

// Returns the bytes of an element of one of the format's dtypes, or 0 for an unknown name and for
// dtypes smaller than a byte.
inline int64_t SafetensorsElementBytes(absl::string_view dtype) {
  static constexpr struct {
    const char* name;
    int64_t bytes;
  } kDTypes[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2},  {"F64", 8},     {"I32", 4},
                 {"I64", 8}, {"I16", 2},  {"I8", 1},   {"U8", 1},      {"U16", 2},
                 {"U32", 4}, {"U64", 8},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
  for (const auto& known : kDTypes) {
    if (dtype == known.name) return known.bytes;
  }
  return 0;
}

}  // namespace burst
