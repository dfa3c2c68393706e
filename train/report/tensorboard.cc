#include "train/report/tensorboard.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// CRC-32C (Castagnoli), reflected; RFC 3720, appendix B.4.
uint32_t Crc32c(absl::string_view bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78 : 0);
  }
  return ~crc;
}

// Appends a number in little-endian order, as all numbers in the file.
template <typename T>
std::string Bytes(T value) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Checksums of TFRecords are rotated and offset, so that a checksum of data that holds checksums is
// not constant.
std::string Checksum(absl::string_view bytes) {
  const uint32_t crc = Crc32c(bytes);
  return Bytes((crc >> 15 | crc << 17) + 0xa282ead8u);
}

// Fields of a protocol buffer: key = number * 8 + wire type.
enum WireType { kVarint = 0, k64Bits = 1, kLengthDelimited = 2, k32Bits = 5 };

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) bytes.push_back(static_cast<char>(value | 128));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string Field(int number, WireType type, absl::string_view payload) {
  std::string field = Varint(static_cast<uint64_t>(number) * 8 + type);
  if (type == kLengthDelimited) field += Varint(payload.size());
  return absl::StrCat(field, payload);
}

double SecondsSince1970() {
  const std::chrono::duration<double> time = std::chrono::system_clock::now().time_since_epoch();
  return time.count();
}

// Makes an Event: wall_time = 1, step = 2 (absent for 0), and one of file_version = 3, summary = 5,
// session_log = 7.
std::string Event(int64_t step, const std::string& what) {
  return absl::StrCat(Field(1, k64Bits, Bytes(SecondsSince1970())),
                      step == 0 ? "" : Field(2, kVarint, Varint(static_cast<uint64_t>(step))),
                      what);
}

struct Scalar {
  const char* tag;
  double value;
};

// Makes a Summary: value = 1, repeated; the value's tag = 1, simple_value = 2.
std::string SummaryEvent(int64_t step, std::initializer_list<Scalar> scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    summary += Field(1, kLengthDelimited,
                     absl::StrCat(Field(1, kLengthDelimited, scalar.tag),
                                  Field(2, k32Bits, Bytes(static_cast<float>(scalar.value)))));
  }
  return Event(step, Field(5, kLengthDelimited, summary));
}

}  // namespace

absl::StatusOr<TensorBoardLog> TensorBoardLog::Create(const std::string& folder,
                                                      int64_t last_step) {
  char host[256] = "host";
  gethostname(host, sizeof(host) - 1);
  const std::string path =
      absl::StrCat(folder, "/events.out.tfevents.", static_cast<int64_t>(SecondsSince1970()), ".",
                   host, ".", getpid());
  // An existing file is never opened: another process with this number wrote it in this second.
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  TensorBoardLog log(path, fd);
  if (fd < 0) {
    return absl::PermissionDeniedError(absl::StrCat("cannot create ", path, ": ", strerror(errno)));
  }
  BURST_RETURN_IF_ERROR(log.Write(Event(0, Field(3, kLengthDelimited, "brain.Event:2"))));
  if (last_step > 0) {
    // SessionLog: status = 1, START = 1. Events of this step and later ones in older files are
    // dropped.
    BURST_RETURN_IF_ERROR(
        log.Write(Event(last_step + 1, Field(7, kLengthDelimited, Field(1, kVarint, Varint(1))))));
  }
  return log;
}

TensorBoardLog::TensorBoardLog(TensorBoardLog&& other)
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

TensorBoardLog::~TensorBoardLog() {
  if (fd_ >= 0) close(fd_);
}

absl::Status TensorBoardLog::Append(const StepMetrics& row) {
  BURST_RETURN_IF_ERROR(Write(SummaryEvent(row.step, {{"loss/train", row.loss},
                                                      {"lr", row.lr},
                                                      {"grad_norm", row.grad_norm},
                                                      {"tokens_per_second", row.tokens_per_second},
                                                      {"step_ms", row.step_ms}})));
  BURST_RETURN_IF_ERROR(WriteOptional(row, /*of_validation=*/false));
  return AppendValidation(row);
}

absl::Status TensorBoardLog::AppendValidation(const StepMetrics& row) {
  return WriteOptional(row, /*of_validation=*/true);
}

absl::Status TensorBoardLog::WriteOptional(const StepMetrics& row, bool of_validation) {
  for (const OptionalMetric& metric : kOptionalMetrics) {
    const std::optional<double>& value = row.*metric.value;
    if (metric.of_validation != of_validation || !value.has_value()) continue;
    BURST_RETURN_IF_ERROR(Write(SummaryEvent(row.step, {{metric.scalar, *value}})));
  }
  return absl::OkStatus();
}

// Writes a record: the length and its checksum, the data and its checksum.
absl::Status TensorBoardLog::Write(absl::string_view event) {
  const std::string length = Bytes(uint64_t{event.size()});
  const std::string record = absl::StrCat(length, Checksum(length), event, Checksum(event));
  ssize_t written;
  do {
    written = write(fd_, record.data(), record.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(record.size())) return absl::OkStatus();
  if (written >= 0) errno = ENOSPC;  // a record cut short
  return absl::ResourceExhaustedError(absl::StrCat("cannot write ", path_, ": ", strerror(errno)));
}

}  // namespace burst
