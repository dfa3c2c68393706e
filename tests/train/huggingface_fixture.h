// Small Hugging Face directories: config.json and tensors of tests/train/testdata/huggingface.json,
// which tests/interop/fixtures.py writes, with weights that are made here.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "burst/tensor/tensor.h"
#include "train/checkpoint/safetensors_writer.h"
#include "train/huggingface/config.h"

namespace burst {

inline std::string Content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void SetContent(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

// Returns a number from -1 to 1, a multiple of 2^-15, like `numbers` of fixtures.py.
inline float Number(uint64_t tensor, uint64_t i) {
  uint64_t h = i + tensor * 1000003;
  const auto mix = [&](int shift, uint64_t factor) {
    h = (h * 2654435761) & 0xFFFFFFFF;
    h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF;
  };
  mix(15, 2246822519);
  mix(13, 3266489917);
  mix(16, 1);
  return static_cast<float>(static_cast<double>(h >> 16) / 32768 - 1);
}

// Holds a directory before it is written.
struct FakeDirectory {
  struct TensorBytes {
    std::string dtype;
    Shape shape;
    std::string bytes;
  };
  nlohmann::json config;
  std::map<std::string, TensorBytes> tensors;

  // Makes the directory of one of the models, with float32 weights.
  explicit FakeDirectory(const nlohmann::json& model) : config(model["config"]) {
    uint64_t number = 0;
    for (const auto& [name, dims] :
         model["tensors"].get<std::vector<std::pair<std::string, std::vector<int64_t>>>>()) {
      TensorBytes tensor{"F32", Shape(dims.begin(), dims.end()), ""};
      int64_t numel = 1;
      for (const int64_t dim : dims) numel *= dim;
      for (int64_t i = 0; i < numel; ++i) {
        const float value = Number(number, i);
        tensor.bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
      }
      ++number;
      tensors[name] = std::move(tensor);
    }
  }

  // Cuts the weights to their upper 16 bits, which become a bfloat16 (`bfloat`) or a float16.
  void MakeSixteenBit(bool bfloat) {
    config["torch_dtype"] = bfloat ? "bfloat16" : "float16";
    for (auto& [name, tensor] : tensors) {
      std::string bytes;
      for (size_t i = 0; i < tensor.bytes.size(); i += 4) {
        uint16_t bits;
        std::memcpy(&bits, tensor.bytes.data() + i + 2, sizeof(bits));
        if (!bfloat) bits &= 0xBBFF;  // an exponent that is not infinity's
        bytes.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
      }
      tensor.bytes = std::move(bytes);
      tensor.dtype = bfloat ? "BF16" : "F16";
    }
  }

  // Makes the layers' matrices float8, with a scale for each block of rows and columns. The scales
  // are powers of two, and a weight's bits are its place modulo 256, without the two NaN.
  void MakeFloat8(int64_t rows, int64_t cols) {
    config["quantization_config"] = {{"quant_method", "fp8"},
                                     {"activation_scheme", "dynamic"},
                                     {"weight_block_size", {rows, cols}}};
    std::map<std::string, TensorBytes> scales;
    for (auto& [name, tensor] : tensors) {
      if (name.find("layers.") == std::string::npos || tensor.shape.size() != 2) continue;
      std::string bytes(tensor.bytes.size() / 4, '\0');
      for (size_t i = 0; i < bytes.size(); ++i) {
        const int bits = static_cast<int>(i % 256);
        bytes[i] = static_cast<char>(bits % 128 == 127 ? 0 : bits);
      }
      tensor.bytes = std::move(bytes);
      tensor.dtype = "F8_E4M3";
      TensorBytes& scale = scales[name + "_scale_inv"];
      scale = {
          "F32", {(tensor.shape[0] + rows - 1) / rows, (tensor.shape[1] + cols - 1) / cols}, ""};
      for (int64_t i = 0; i < scale.shape[0] * scale.shape[1]; ++i) {
        const float value = std::ldexp(1.0f, static_cast<int>(i % 7) - 3);
        scale.bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
      }
    }
    tensors.merge(scales);
  }

  void Rename(const std::string& from, const std::string& to) {
    tensors[to] = tensors.at(from);
    tensors.erase(from);
  }

  void WriteConfig(const std::string& folder) const {
    std::filesystem::create_directories(folder);
    SetContent(folder + "/config.json", config.dump(2) + "\n");
  }

  static void WriteTensors(const std::string& path,
                           const std::map<std::string, TensorBytes>& tensors) {
    std::vector<SafetensorsWriter::Entry> entries;
    for (const auto& [name, tensor] : tensors) {
      entries.push_back({name, tensor.dtype, tensor.shape});
    }
    auto writer = SafetensorsWriter::Create(path, entries, {{"format", "pt"}}, /*checksums=*/false);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (const auto& [name, tensor] : tensors) {
      ASSERT_TRUE(
          writer->Write(tensor.bytes.data(), static_cast<int64_t>(tensor.bytes.size())).ok());
    }
    ASSERT_TRUE(writer->Commit().ok());
  }

  void Write(const std::string& folder) const {
    WriteConfig(folder);
    WriteTensors(folder + "/model.safetensors", tensors);
  }

  // Writes `files` files with an index. Tensors are dealt to them in turns.
  void WriteFiles(const std::string& folder, int files) const {
    WriteConfig(folder);
    std::vector<std::map<std::string, TensorBytes>> parts(files);
    nlohmann::json map;
    int next = 0;
    for (const auto& [name, tensor] : tensors) {
      const int file = next++ % files;
      parts[file][name] = tensor;
      map[name] = "part-" + std::to_string(file) + ".safetensors";
    }
    for (int i = 0; i < files; ++i) {
      WriteTensors(folder + "/part-" + std::to_string(i) + ".safetensors", parts[i]);
    }
    SetContent(folder + "/model.safetensors.index.json",
               nlohmann::json{{"metadata", {{"total_size", 0}}}, {"weight_map", map}}.dump());
  }
};

class HuggingFaceTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    // In the archive of GPU tests the file lies next to the program.
    const std::string path = "tests/train/testdata/huggingface.json";
    fixtures_ =
        nlohmann::json::parse(Content(std::filesystem::exists(path) ? path : "huggingface.json"));
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  FakeDirectory Fake(const std::string& model) const {
    return FakeDirectory(fixtures_["models"][model]);
  }

  std::string folder_;
  nlohmann::json fixtures_;
};

// Expects that the config.json of a model means this model.
inline void ExpectWritten(const HuggingFaceConfig& config) {
  const auto json = MakeHuggingFaceConfig(config);
  ASSERT_TRUE(json.ok()) << json.status();
  const auto again = ParseHuggingFaceConfig(*json);
  ASSERT_TRUE(again.ok()) << again.status() << *json;
  EXPECT_EQ(ModelDifference(again->model, config.model), "") << *json;
  EXPECT_EQ(again->window, config.window);
  EXPECT_EQ(again->dtype, config.dtype);
}

}  // namespace burst
