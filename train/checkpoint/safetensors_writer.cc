#include "train/checkpoint/safetensors_writer.h"

#include <xxhash.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "burst/base/check.h"
#include "burst/base/status.h"
#include "train/checkpoint/safetensors_format.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

int64_t Bytes(const SafetensorsWriter::Entry& entry) {
  int64_t bytes = SafetensorsElementBytes(entry.dtype);
  BURST_CHECK(bytes > 0) << entry.dtype;
  for (const int64_t dim : entry.shape) bytes *= dim;
  return bytes;
}

}  // namespace

struct SafetensorsWriter::State {
  State(AtomicFile opened, std::vector<Entry> all, StringMap strings, bool sums)
      : file(std::move(opened)),
        entries(std::move(all)),
        metadata(std::move(strings)),
        checksums(sums) {}

  AtomicFile file;
  const std::vector<Entry> entries;
  const StringMap metadata;
  const bool checksums;
  std::vector<std::string> digits;  // checksums of the complete tensors
  int64_t left = 0;                 // bytes of the tensor being written
  XXH3_state_t sum;
};

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) = default;
SafetensorsWriter::~SafetensorsWriter() = default;

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(const std::string& path,
                                                            std::vector<Entry> entries,
                                                            const StringMap& metadata,
                                                            bool checksums) {
  BURST_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path));
  SafetensorsWriter writer(
      std::make_unique<State>(std::move(file), std::move(entries), metadata, checksums));
  // The checksums are not known yet, but their length is.
  const std::string header = writer.HeaderText();
  const uint64_t length = header.size();  // this machine is little-endian, as is the format
  BURST_RETURN_IF_ERROR(writer.state_->file.Write(&length, sizeof(length)));
  BURST_RETURN_IF_ERROR(
      writer.state_->file.Write(header.data(), static_cast<int64_t>(header.size())));
  XXH3_64bits_reset(&writer.state_->sum);
  if (!writer.state_->entries.empty()) writer.state_->left = Bytes(writer.state_->entries[0]);
  writer.SkipCompleteTensors();
  return writer;
}

std::string SafetensorsWriter::HeaderText() const {
  const State& state = *state_;
  Json strings = Json::object();
  for (const auto& [key, value] : state.metadata) strings[key] = value;
  if (state.checksums) {
    strings[kHeaderChecksum] = kNoDigits;
    for (size_t i = 0; i < state.entries.size(); ++i) {
      strings[kTensorChecksum + state.entries[i].name] =
          i < state.digits.size() ? state.digits[i] : kNoDigits;
    }
  }
  Json header = Json::object();
  if (!strings.empty()) header[kMetadata] = strings;
  int64_t offset = 0;
  for (const Entry& entry : state.entries) {
    const int64_t end = offset + Bytes(entry);
    header[entry.name] = {{"dtype", entry.dtype},
                          {"shape", std::vector<int64_t>(entry.shape.begin(), entry.shape.end())},
                          {"data_offsets", {offset, end}}};
    offset = end;
  }
  // Spaces at the end align the data to 8 bytes. A string that is not UTF-8 must not throw.
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (!state.checksums) return text;
  const size_t at = text.find(kHeaderChecksumText) + strlen(kHeaderChecksumText);
  const std::string digits = Digits(XXH3_64bits(text.data(), text.size()));
  return text.replace(at, digits.size(), digits);
}

void SafetensorsWriter::SkipCompleteTensors() {
  while (state_->left == 0 && state_->digits.size() < state_->entries.size()) {
    state_->digits.push_back(Digits(XXH3_64bits_digest(&state_->sum)));
    XXH3_64bits_reset(&state_->sum);
    const size_t next = state_->digits.size();
    if (next < state_->entries.size()) state_->left = Bytes(state_->entries[next]);
  }
}

absl::Status SafetensorsWriter::Write(const void* data, int64_t bytes) {
  BURST_CHECK_LE(bytes, state_->left) << "beyond the tensor";
  if (state_->checksums) XXH3_64bits_update(&state_->sum, data, bytes);
  BURST_RETURN_IF_ERROR(state_->file.Write(data, bytes));
  state_->left -= bytes;
  SkipCompleteTensors();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Commit() {
  BURST_CHECK(state_->digits.size() == state_->entries.size()) << "tensors are missing";
  if (state_->checksums) {
    const std::string header = HeaderText();
    BURST_RETURN_IF_ERROR(
        state_->file.WriteAt(sizeof(uint64_t), header.data(), static_cast<int64_t>(header.size())));
  }
  return state_->file.Commit();
}

}  // namespace burst
