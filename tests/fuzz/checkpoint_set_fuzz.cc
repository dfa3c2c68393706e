// Reads sets of files (train/checkpoint/checkpoint_set.h) with right checksums and any lists of
// parts. A whole tensor has at every place an element that some file has for it, which the target
// looks up one by one. Every other set is DataLoss.
//
// The input is the number of files. Each file has the lengths of its tensors a and b, then its list
// of parts up to a newline.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "burst/base/check.h"
#include "tests/fuzz/fuzz_file.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/checkpoint/checkpoint_set.h"
#include "train/checkpoint/safetensors.h"

namespace burst {
namespace {

using Json = nlohmann::json;

// A file's tensor "a" or "b", whose elements are first, first + 1, ...
struct Stored {
  std::string name;
  int64_t length = 0;
  float first = 0;
  Json part;
};

// Returns the places of a part's elements in the whole tensor.
std::vector<int64_t> PlacesOf(const Json& part, const std::vector<int64_t>& shape) {
  int64_t numel = 1, inner = 1;
  for (const int64_t dim : shape) numel *= dim;
  std::vector<int64_t> places;
  if (!part.contains("slices")) {
    for (int64_t i = 0; i < numel; ++i) places.push_back(i);
    return places;
  }
  const size_t axis = part["axis"];
  for (size_t i = axis + 1; i < shape.size(); ++i) inner *= shape[i];
  for (int64_t outer = 0; outer < numel / (shape[axis] * inner); ++outer) {
    for (const Json& slice : part["slices"]) {
      for (int64_t i = 0; i < slice[1].get<int64_t>() * inner; ++i) {
        places.push_back((outer * shape[axis] + slice[0].get<int64_t>()) * inner + i);
      }
    }
  }
  return places;
}

void CheckTensor(const CheckpointReader& reader, const std::string& name,
                 const std::vector<Stored>& stored) {
  const auto one =
      std::find_if(stored.begin(), stored.end(), [&](const Stored& s) { return s.name == name; });
  BURST_CHECK(one != stored.end()) << name;
  const auto dims = one->part.at("shape").get<std::vector<int64_t>>();
  const Shape shape(dims.begin(), dims.end());
  TensorPart all;
  all.full_shape = shape;
  all.length = 1;
  for (const int64_t dim : dims) all.length *= dim;
  const CheckpointReader::Wanted wanted = {name, Tensor::Zeros(shape, DType::kFloat32), all};
  const absl::Status status = reader.Read({&wanted, 1});
  std::vector<std::set<float>> elements(all.length);
  for (const Stored& s : stored) {
    if (s.name != name || s.length == 0) continue;
    const std::vector<int64_t> places = PlacesOf(s.part, dims);
    const int64_t begin = s.part.at("begin");
    for (int64_t i = 0; i < s.length; ++i) {
      elements[places.at(begin + i)].insert(s.first + static_cast<float>(i));
    }
  }
  const bool complete = std::none_of(elements.begin(), elements.end(),
                                     [](const std::set<float>& some) { return some.empty(); });
  BURST_CHECK_EQ(status.ok(), complete) << status.ToString();
  BURST_CHECK(complete || absl::IsDataLoss(status)) << status.ToString();
  for (int64_t i = 0; complete && i < all.length; ++i) {
    BURST_CHECK(elements[i].count(wanted.whole.data<float>()[i]) > 0) << name << " at " << i;
  }
}

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  static const FuzzFolder folder;
  const std::string set = "step.set", in = folder.Path(set);
  std::filesystem::remove_all(in);
  std::filesystem::create_directories(in);
  FuzzInput input(data, size);
  const int files = static_cast<int>(input.Integer(1, 3));
  std::vector<Stored> stored;
  float next = 0;
  for (int file = 0; file < files; ++file) {
    const int64_t lengths[] = {input.Integer(0, 40), input.Integer(0, 40)};
    const std::string text = input.TextUntil('\n');
    std::vector<NamedTensor> tensors;
    for (int i = 0; i < 2; ++i) {
      std::vector<float> values(lengths[i]);
      stored.push_back({i == 0 ? "a" : "b", lengths[i], next, Json()});
      for (float& value : values) value = next++;
      tensors.push_back({stored.back().name, Tensor::FromVector(values, {lengths[i]})});
    }
    const std::string in_file = SetFilePath(in, file, files);
    if (!WriteSafetensors(in_file, tensors, {{"parts", text}}).ok()) return;
    // A header holds text, which replaces bytes that are not UTF-8.
    const absl::StatusOr<SafetensorsFile> there = SafetensorsFile::Open(in_file);
    BURST_CHECK(there.ok()) << there.status().ToString();
    const Json parts =
        Json::parse(there->metadata().at("parts"), nullptr, /*allow_exceptions=*/false);
    for (size_t i = stored.size() - 2; i < stored.size() && parts.is_object(); ++i) {
      stored[i].part = parts.value(stored[i].name, Json());
    }
  }
  const std::string path = folder.Path("index");
  const absl::Status written = WriteSetIndex(path, {}, set, files);
  BURST_CHECK(written.ok()) << written.ToString();
  const absl::StatusOr<CheckpointReader> reader = CheckpointReader::Open(path);
  if (!reader.ok()) {
    BURST_CHECK(absl::IsDataLoss(reader.status())) << reader.status().ToString();
    return;
  }
  BURST_CHECK(reader->Verify().ok());
  BURST_CHECK(reader->numel() <= static_cast<int64_t>(next));
  for (const std::string& name : reader->names()) CheckTensor(*reader, name, stored);
}

}  // namespace burst
