// Writes files for targets that read files. They are in memory where the system has such a folder,
// because some targets flush them to the disk.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/string_view.h"
#include "burst/base/check.h"

namespace burst {

// A folder of this process, removed at its end.
class FuzzFolder {
 public:
  FuzzFolder() {
    std::error_code error;
    const bool memory = access("/dev/shm", W_OK) == 0;
    path_ = (memory ? "/dev/shm" : std::filesystem::temp_directory_path().string()) +
            "/burst-fuzz-" + std::to_string(getpid());
    std::filesystem::create_directories(path_, error);
    BURST_CHECK(!error) << path_ << ": " << error.message();
  }
  ~FuzzFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  std::string Path(const std::string& name) const { return path_ + "/" + name; }

  // Returns the path.
  std::string Write(const std::string& name, absl::string_view content) const {
    std::ofstream file(Path(name), std::ios::binary | std::ios::trunc);
    file.write(content.data(), static_cast<std::streamsize>(content.size()));
    file.close();
    BURST_CHECK(file.good()) << Path(name);
    return Path(name);
  }

 private:
  std::string path_;
};

// Returns the content of a safetensors file. Bytes are taken as they are. If they start with '{',
// they are a header up to the first newline and the data after it, so the header's length is right.
inline std::string SafetensorsContent(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  if (size == 0 || bytes[0] != '{') return bytes;
  const size_t newline = bytes.find('\n');
  const std::string header = bytes.substr(0, newline);
  const uint64_t length = header.size();
  const std::string prefix(reinterpret_cast<const char*>(&length), sizeof(length));
  return prefix + header + (newline == std::string::npos ? "" : bytes.substr(newline + 1));
}

}  // namespace burst
