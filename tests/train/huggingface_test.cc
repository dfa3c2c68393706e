// Tests Hugging Face directories. Logits equal those of transformers, an export returns the
// imported weights, and damaged or unsuitable files are refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "model/transformer.h"
#include "tests/testing/subprocess.h"
#include "tests/testing/test_device.h"
#include "tests/train/huggingface_fixture.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/huggingface/directory.h"
#include "train/huggingface/export.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using namespace std::string_literals;  // NOLINT

// transformers computes RoPE's angles in float32, so twelve positions have an error of 2^-24 each.
// Scores and the values after them multiply it by less than ten, because both have that order.
constexpr double kAngleTolerance = 10 * 12 * 6e-8;

std::unique_ptr<Transformer> Load(const std::string& folder, DType dtype = DType::kFloat64) {
  const auto found = FindPretrained(folder);
  EXPECT_TRUE(found.ok()) << found.status();
  if (!found.ok()) return nullptr;
  auto model = *Transformer::Create(found->model, dtype, std::nullopt, kTestDevice);
  const absl::Status loaded = LoadPretrained(*found, &model->parameters());
  EXPECT_TRUE(loaded.ok()) << loaded;
  return model;
}

std::vector<double> Logits(const Transformer& model, const std::vector<int32_t>& tokens,
                           int64_t window) {
  const Shape shape = {1, static_cast<int64_t>(tokens.size())};
  std::vector<int32_t> positions;
  for (int32_t t = 0; t < shape[1]; ++t) positions.push_back(t);
  BurstAttentionOptions options;
  options.scores.softcap = model.config().attention_softcap;
  const auto attention = *BurstAttention::Create(options, nullptr);
  Tape tape(/*recording=*/false);
  const SequenceBatch batch = {
      Tensor::FromVector(tokens, shape, kTestDevice),
      Tensor::FromVector(positions, shape, kTestDevice), Tensor(),
      *MakeLayerSchedules(model.config(), *attention, shape[1], Mask::SlidingWindow(window))};
  return model.Logits(tape, *attention, batch).value().ToVector<double>();
}

TEST_F(HuggingFaceTest, LogitsAreThoseOfTransformers) {
  const auto tokens = fixtures_["tokens"].get<std::vector<int32_t>>();
  for (const auto& [name, fixture] : fixtures_["models"].items()) {
    SCOPED_TRACE(name);
    FakeDirectory(fixture).Write(Path(name));
    const int64_t window = FindPretrained(Path(name))->window;
    const nlohmann::json& given = fixture["config"];
    const nlohmann::json width = given.value("sliding_window", nlohmann::json());
    EXPECT_EQ(window, given.value("use_sliding_window", width != nullptr) ? 5 : 0);
    const auto model = Load(Path(name));
    ASSERT_NE(model, nullptr);
    const std::vector<double> logits = Logits(*model, tokens, window);
    size_t at = 0;
    double scale = 0;
    for (const double logit : logits) scale = std::max(scale, std::abs(logit));
    for (const auto& row : fixture["logits"]) {
      for (const double expected : row) {
        ASSERT_NEAR(logits[at], expected, kAngleTolerance * scale) << at;
        ++at;
      }
    }
    EXPECT_EQ(at, logits.size());
  }
}

TEST_F(HuggingFaceTest, SeveralFilesAreOneModel) {
  for (const char* name : {"qwen3", "gpt2"}) {
    Fake(name).Write(Path("one"));
    Fake(name).WriteFiles(Path("many"), 4);
    EXPECT_EQ(Load(Path("one"))->parameters().values().ToVector<double>(),
              Load(Path("many"))->parameters().values().ToVector<double>());
    fs::remove_all(Path("one"));
    fs::remove_all(Path("many"));
  }
}

// Old directories have names without the usual prefix, and tensors that are computed.
TEST_F(HuggingFaceTest, OldDirectories) {
  for (const std::string name : {"gpt2", "llama"}) {
    FakeDirectory fake = Fake(name);
    fake.Write(Path(name));
    const std::string prefix = name == "gpt2" ? "transformer." : "model.";
    std::vector<std::string> names;
    for (const auto& [tensor, bytes] : fake.tensors) names.push_back(tensor);
    for (const std::string& tensor : names) {
      if (tensor.rfind(prefix, 0) == 0) fake.Rename(tensor, tensor.substr(prefix.size()));
    }
    const FakeDirectory::TensorBytes mask{"U8", {1, 1, 2, 2}, std::string(4, '\1')};
    fake.tensors[name == "gpt2" ? "h.0.attn.bias" : "layers.0.self_attn.rotary_emb.inv_freq"] =
        mask;
    fake.Write(Path(name + "_old"));
    EXPECT_EQ(Load(Path(name))->parameters().values().ToVector<double>(),
              Load(Path(name + "_old"))->parameters().values().ToVector<double>());
  }
}

// Ranks that divide a model's state keep their pieces of the tensors, and the values.
TEST_F(HuggingFaceTest, RanksThatDivideTheStateReadTheirPieces) {
  for (const char* name : {"qwen3", "gpt2"}) {
    Fake(name).WriteFiles(Path(name), 2);
    const auto found = FindPretrained(Path(name));
    ASSERT_TRUE(found.ok()) << found.status();
    const auto whole = Load(Path(name), DType::kFloat32);
    for (const int stage : {1, 2, 3}) {
      for (int rank = 0; rank < 3; ++rank) {
        const auto part = *Transformer::Create(found->model, DType::kFloat32, std::nullopt,
                                               kTestDevice, {}, {stage, 3, rank});
        ASSERT_EQ(LoadPretrained(*found, &part->parameters()), absl::OkStatus());
        for (int i = 0; i < whole->parameters().size(); ++i) {
          const ParameterPiece piece = part->parameters().PieceOf(i, rank);
          const std::vector<float> all = whole->parameters().Masters(i).ToVector<float>();
          EXPECT_EQ(part->parameters().Masters(i).ToVector<float>(),
                    std::vector<float>(all.begin() + piece.begin,
                                       all.begin() + piece.begin + piece.length));
          if (stage == 3) continue;
          EXPECT_EQ(part->parameters().variable(i).value().ToVector<float>(), all);
        }
      }
    }
    fs::remove_all(Path(name));
  }
}

// Each of several ranks reads its own parts.
TEST_F(HuggingFaceTest, RanksOfTensorParallelismReadTheirParts) {
  for (const char* name : {"qwen2", "qwen3"}) {
    Fake(name).WriteFiles(Path(name), 2);
    const auto found = FindPretrained(Path(name));
    ASSERT_TRUE(found.ok()) << found.status();
    const auto whole = Load(Path(name), DType::kFloat32);
    const absl::Status status = RunRanks(4, [&](Communicator& comm) -> absl::Status {
      BURST_ASSIGN_OR_RETURN(const auto part,
                             Transformer::Create(found->model, DType::kFloat32, std::nullopt,
                                                 DeviceType::kCpu, TensorParallel(&comm, false)));
      BURST_RETURN_IF_ERROR(LoadPretrained(*found, &part->parameters()));
      for (int i = 0; i < whole->parameters().size(); ++i) {
        const Parameter& p = part->parameters()[i];
        const Tensor expected = Tensor::Empty(p.shape, DType::kFloat32);
        p.TakeShard(comm.rank(), whole->parameters().variable(i).value(), expected);
        EXPECT_EQ(p.variable.value().ToVector<float>(), expected.ToVector<float>()) << p.name;
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// The numbers of e4m3 by its definition: the sign, 2^(exponent - 7) and 1 + mantissa / 8, or
// without the leading 1 for an exponent of 0.
double E4M3(int bits) {
  const double mantissa = bits % 8 / 8.0;
  const int exponent = bits / 8 % 16;
  const double magnitude =
      exponent == 0 ? mantissa / 64 : (1 + mantissa) * std::pow(2.0, exponent - 7);
  return bits >= 128 ? -magnitude : magnitude;
}

// Weights in float8 with a scale for each block (DeepSeek-V3's layout) are their products.
TEST_F(HuggingFaceTest, ReadsFloat8WithBlockScales) {
  constexpr int64_t kRows = 5, kCols = 8;  // the last block of rows is not full
  for (const std::string model : {"llama", "qwen3"}) {
    FakeDirectory fake = Fake(model);
    fake.MakeFloat8(kRows, kCols);
    fake.WriteFiles(Path(model), 2);
    const auto directory = HuggingFaceDirectory::Open(Path(model));
    ASSERT_TRUE(directory.ok()) << directory.status();
    for (const Parameter& parameter : directory->parameters()) {
      if (parameter.name != "layers.1.ffn.down.weight") continue;
      const Tensor whole = Tensor::Empty(parameter.full_shape, DType::kFloat32);
      ASSERT_TRUE(directory->Read(parameter, whole).ok());
      const int64_t cols = whole.dim(1), blocks = (cols + kCols - 1) / kCols;
      const std::vector<double> values = whole.ToVector<double>();
      for (int64_t i = 0; i < whole.numel(); ++i) {
        const int bits = static_cast<int>(i % 256);
        const int64_t block = i / cols / kRows * blocks + i % cols / kCols;
        const double scale = std::pow(2.0, static_cast<double>(block % 7 - 3));
        ASSERT_EQ(values[i], bits % 128 == 127 ? 0 : E4M3(bits) * scale) << i;
      }
    }
    // The model has the same weights, and its export does not say that they are float8.
    const std::string in = Path(model + "_in"), out = Path(model + "_out");
    ASSERT_EQ(ImportHuggingFace(Path(model), in), absl::OkStatus());
    ASSERT_EQ(ExportHuggingFace(CheckpointPath(in), out, {}), absl::OkStatus());
    EXPECT_EQ(Content(out + "/config.json").find("quantization_config"), std::string::npos);
    EXPECT_EQ(Load(out)->parameters().values().ToVector<double>(),
              Load(Path(model))->parameters().values().ToVector<double>());
  }
}

// A number of float8 that is not finite is found.
TEST_F(HuggingFaceTest, NotANumberInFloat8IsNamed) {
  FakeDirectory fake = Fake("llama");
  fake.MakeFloat8(4, 8);
  fake.tensors["model.layers.1.mlp.down_proj.weight"].bytes[9] = '\x7F';
  fake.Write(Path("nan"));
  const absl::Status status = ImportHuggingFace(Path("nan"), Path("nan_in"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("down_proj"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("not finite"));
}

// ---- There and back.

void ExpectThereAndBack(const FakeDirectory& fake, const std::string& folder) {
  const std::string from = folder + "/from", in = folder + "/in", back = folder + "/back";
  for (const std::string& path : {from, in, back}) fs::remove_all(path);
  fake.Write(from);
  SetContent(from + "/tokenizer.json", "{\"a\": \"tokenizer\"}");
  absl::Status status = ImportHuggingFace(from, in);
  ASSERT_TRUE(status.ok()) << status;
  status = ExportHuggingFace(CheckpointPath(in), back, {});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Content(from + "/model.safetensors") == Content(back + "/model.safetensors"));
  EXPECT_EQ(Content(from + "/config.json"), Content(back + "/config.json"));
  EXPECT_EQ(Content(from + "/tokenizer.json"), Content(back + "/tokenizer.json"));
}

TEST_F(HuggingFaceTest, ThereAndBackAreTheSameBytes) {
  for (const auto& [name, fixture] : fixtures_["models"].items()) {
    for (const char* dtype : {"F32", "BF16", "F16"}) {
      SCOPED_TRACE(name + " " + dtype);
      FakeDirectory fake(fixture);
      if (dtype != std::string("F32")) fake.MakeSixteenBit(dtype == std::string("BF16"));
      ExpectThereAndBack(fake, folder_);
    }
  }
}

// A tied model may also store its head, if it equals the embedding. The head is never lost.
TEST_F(HuggingFaceTest, AHeadBesideATiedEmbeddingMustBeTheSame) {
  for (const std::string name : {"qwen2", "gpt2"}) {
    SCOPED_TRACE(name);
    const std::string embedding =
        name == "gpt2" ? "transformer.wte.weight" : "model.embed_tokens.weight";
    FakeDirectory fake = Fake(name);
    fake.Write(Path(name));
    const auto expected = Load(Path(name))->parameters().values().ToVector<double>();
    fake.tensors["lm_head.weight"] = fake.tensors[embedding];
    for (const int files : {1, 2}) {
      const std::string folder = Path(name + std::to_string(files));
      files == 1 ? fake.Write(folder) : fake.WriteFiles(folder, files);
      EXPECT_EQ(Load(folder)->parameters().values().ToVector<double>(), expected);
    }
    const auto refused = [&](const std::vector<std::string>& says) {
      const std::string folder = Path(name + "_other");
      fs::remove_all(folder);
      fake.WriteFiles(folder, 2);
      const std::string message(HuggingFaceDirectory::Open(folder).status().message());
      for (const std::string& part : {folder, "'lm_head.weight' and '" + embedding + "'"s}) {
        EXPECT_THAT(message, HasSubstr(part));
      }
      for (const std::string& part : says) EXPECT_THAT(message, HasSubstr(part));
    };
    const int64_t row = static_cast<int64_t>(fake.tensors["lm_head.weight"].bytes.size()) / 11;
    fake.tensors["lm_head.weight"].bytes[7 * row + 5] ^= 1;
    refused({"must be equal", "row 7", "tie_word_embeddings = false"});
    fake.tensors["lm_head.weight"].shape[1] /= 2;
    fake.tensors["lm_head.weight"].bytes.resize(11 * row / 2);
    refused({"must be equal", "[11, "});
    if (name == "gpt2") continue;
    // Without tying, both are kept.
    fake = Fake(name);
    fake.tensors["lm_head.weight"] = fake.tensors[embedding];
    fake.tensors["lm_head.weight"].bytes[5] ^= 1;
    fake.config["tie_word_embeddings"] = false;
    fake.Write(Path("untied"));
    EXPECT_GT(Load(Path("untied"))->parameters().numel(), static_cast<int64_t>(expected.size()));
  }
}

TEST_F(HuggingFaceTest, NoneOfSeveralSourcesOfWeightsIsTakenSilently) {
  const FakeDirectory fake = Fake("llama");
  fake.Write(Path("one"));
  EXPECT_EQ(UnreadWeights(*FindPretrained(Path("one"))), "");
  SetContent(Path("one/pytorch_model.bin"), "");
  EXPECT_EQ(UnreadWeights(*FindPretrained(Path("one"))),
            "pytorch_model.bin next to the weights is not read");
  for (const char* name : {"adapter_model.safetensors", "consolidated.00.pth", "tf_model.h5"}) {
    SetContent(Path("one/") + name, "");
  }
  EXPECT_EQ(UnreadWeights(*FindPretrained(Path("one"))),
            "adapter_model.safetensors, consolidated.00.pth, pytorch_model.bin, 1 more next to the "
            "weights are not read");
  EXPECT_NE(Load(Path("one")), nullptr);
  // The folder has a single file, and an index of others.
  fake.WriteFiles(Path("one"), 2);
  const std::string both(HuggingFaceDirectory::Open(Path("one")).status().message());
  for (const char* part : {"one: ", "must be there once", "model.safetensors and the files of",
                           "model.safetensors.index.json"}) {
    EXPECT_THAT(both, HasSubstr(part));
  }
  fs::remove(Path("one/model.safetensors"));
  EXPECT_NE(Load(Path("one")), nullptr);
  // The weights have a format that is not read.
  fake.WriteConfig(Path("bin"));
  SetContent(Path("bin/pytorch_model.bin"), "");
  EXPECT_THAT(std::string(HuggingFaceDirectory::Open(Path("bin")).status().message()),
              HasSubstr("bin: the weights must be in model.safetensors; got pytorch_model.bin"));
}

// A run trains on longer texts than the model's context. The test checks the export's fields and
// the RoPE.
TEST_F(HuggingFaceTest, ExportsSayTheContextThatWasTrained) {
  for (const std::string name : {"llama", "llama3", "qwen3", "phi3_long"}) {
    for (const bool scaled_by_context : {false, true}) {
      SCOPED_TRACE(name);
      FakeDirectory fake = Fake(name);
      if (scaled_by_context) {
        for (const char* key : {"rope_scaling", "rope_parameters"}) {
          if (fake.config.contains(key)) fake.config[key].erase("original_max_position_embeddings");
        }
        if (name == "llama") fake.config["max_position_embeddings"] = 16;
      }
      for (const char* folder : {"from", "in", "back"}) fs::remove_all(Path(folder));
      fake.Write(Path("from"));
      ASSERT_EQ(ImportHuggingFace(Path("from"), Path("in")), absl::OkStatus());
      CheckpointInfo info = *ReadCheckpointInfo(CheckpointPath(Path("in")));
      const auto source = HuggingFaceDirectory::Open(Path("from"));
      ASSERT_TRUE(source.ok()) << source.status();
      for (const int64_t seqlen : {8, 48}) {
        info.seqlen = seqlen;
        ASSERT_EQ(SaveWeights(CheckpointPath(Path("in")), info, source->parameters(),
                              [&](const Parameter& parameter, const Tensor& whole) {
                                return source->Read(parameter, whole);
                              }),
                  absl::OkStatus());
        fs::remove_all(Path("back"));
        ASSERT_EQ(ExportHuggingFace(CheckpointPath(Path("in")), Path("back"), {}),
                  absl::OkStatus());
        const auto before = FindPretrained(Path("from")), after = FindPretrained(Path("back"));
        ASSERT_TRUE(after.ok()) << after.status();
        EXPECT_EQ(after->model.context, std::max(seqlen, before->model.context));
        ModelConfig same = after->model;
        same.context = before->model.context;
        EXPECT_EQ(ModelDifference(same, before->model), "");
      }
    }
  }
}

TEST_F(HuggingFaceTest, ExportInSeveralFiles) {
  Fake("qwen2").Write(Path("from"));
  ASSERT_TRUE(ImportHuggingFace(Path("from"), Path("in")).ok());
  ExportOptions options;
  options.file_bytes = 3000;
  ASSERT_TRUE(ExportHuggingFace(CheckpointPath(Path("in")), Path("back"), options).ok());
  const auto index = nlohmann::json::parse(Content(Path("back") + "/model.safetensors.index.json"));
  int64_t total = 0;
  std::map<std::string, int64_t> files;
  for (const auto& [name, tensor] : Fake("qwen2").tensors) {
    total += static_cast<int64_t>(tensor.bytes.size());
    files[index["weight_map"][name]] += static_cast<int64_t>(tensor.bytes.size());
  }
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_EQ(index["weight_map"].size(), Fake("qwen2").tensors.size());
  EXPECT_GE(files.size(), 3u);
  for (const auto& [file, bytes] : files) EXPECT_LE(bytes, 3000) << file;
  EXPECT_EQ(Load(Path("from"))->parameters().values().ToVector<double>(),
            Load(Path("back"))->parameters().values().ToVector<double>());
}

TEST_F(HuggingFaceTest, ExportRoundsAndRefuses) {
  FakeDirectory fake = Fake("llama");
  const float large = 70000;  // too large for float16
  std::memcpy(&fake.tensors["lm_head.weight"].bytes[0], &large, sizeof(large));
  fake.Write(Path("from"));
  ASSERT_TRUE(ImportHuggingFace(Path("from"), Path("in")).ok());
  const std::string checkpoint = CheckpointPath(Path("in"));
  ExportOptions options;
  options.dtype = WeightDType::kBFloat16;
  ASSERT_TRUE(ExportHuggingFace(checkpoint, Path("bf16"), options).ok());
  const auto exact = Load(Path("from"))->parameters().values().ToVector<double>();
  const auto rounded = Load(Path("bf16"))->parameters().values().ToVector<double>();
  ASSERT_EQ(exact.size(), rounded.size());
  for (size_t i = 0; i < exact.size(); ++i) {
    ASSERT_LE(std::abs(exact[i] - rounded[i]), std::abs(exact[i]) / 256) << i;  // half of 2^-7
  }
  options.dtype = WeightDType::kFloat16;
  const absl::Status overflow = ExportHuggingFace(checkpoint, Path("f16"), options);
  EXPECT_EQ(overflow.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(overflow.message()), HasSubstr("'lm_head.weight' holds 70000"));
  EXPECT_THAT(std::string(ExportHuggingFace(checkpoint, Path("bf16"), {}).message()),
              HasSubstr("holds config.json already"));
  EXPECT_THAT(std::string(ImportHuggingFace(Path("from"), Path("in")).message()),
              HasSubstr("holds checkpoints"));
}

TEST_F(HuggingFaceTest, ImportIsACheckpointOfWeightsAlone) {
  Fake("mistral").Write(Path("from"));
  ASSERT_TRUE(ImportHuggingFace(Path("from"), Path("in")).ok());
  const auto info = VerifyCheckpoint(CheckpointPath(Path("in")));
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->step, 0);
  EXPECT_EQ(info->window, 5);
  EXPECT_EQ(info->seqlen, 32);
  EXPECT_TRUE(info->checksums);
  EXPECT_EQ(Load(Path("in"), DType::kFloat32)->parameters().values().ToVector<float>(),
            Load(Path("from"), DType::kFloat32)->parameters().values().ToVector<float>());
  const auto model = *Transformer::Create(info->model, DType::kFloat32, std::nullopt);
  AdamW optimizer({}, model->parameters().numel(), DType::kFloat32, {}, DeviceType::kCpu);
  const absl::Status status =
      LoadCheckpoint(CheckpointPath(Path("in")), &model->parameters(), &optimizer);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("weights alone"));
}

// Someone else's directory may hold links to the user's own files, which a copy would publish. The
// links of a Hugging Face cache lead to its blobs.
TEST_F(HuggingFaceTest, CompanionsComeFromTheDirectoryOrItsCacheAlone) {
  const std::string cache = "models--a--b", snapshot = cache + "/snapshots/1";
  fs::create_directories(Path(cache + "/blobs"));
  Fake("mistral").Write(Path(snapshot));
  const auto write = [&](const std::string& name, const std::string& content) {
    std::ofstream(Path(name)) << content;
  };
  write("private", "a key");
  write(cache + "/blobs/0", "of the cache");
  write(cache + "/other", "beside the blobs");
  write(snapshot + "/template", "in the directory");
  write(snapshot + "/merges.txt", "its own");
  fs::permissions(Path(snapshot + "/merges.txt"), fs::perms(0600));
  fs::create_symlink(Path("private"), Path(snapshot + "/special_tokens_map.json"));
  fs::create_symlink("../../other", Path(snapshot + "/added_tokens.json"));
  fs::create_symlink("../../blobs/0", Path(snapshot + "/vocab.json"));
  fs::create_symlink("template", Path(snapshot + "/chat_template.jinja"));
  // The directory may be named by a link itself.
  fs::create_directory_symlink(Path(snapshot), Path("link"));
  for (const std::string& from : {snapshot, std::string("link")}) {
    testing::internal::CaptureStderr();
    ASSERT_EQ(ImportHuggingFace(Path(from), Path("from " + from)), absl::OkStatus());
    const std::string said = testing::internal::GetCapturedStderr();
    const std::string to = Path("from " + from) + "/huggingface/";
    EXPECT_EQ(ReadAll(to + "vocab.json"), "of the cache");
    EXPECT_EQ(ReadAll(to + "chat_template.jinja"), "in the directory");
    EXPECT_EQ(ReadAll(to + "merges.txt"), "its own");
    EXPECT_EQ(fs::status(to + "merges.txt").permissions(), fs::perms(0600));
    EXPECT_TRUE(fs::exists(to + "config.json"));
    for (const char* name : {"special_tokens_map.json", "added_tokens.json"}) {
      EXPECT_FALSE(fs::exists(to + name)) << name;
      EXPECT_THAT(said, HasSubstr(std::string(name) + " is left out: it leads to "));
    }
  }
  // These are the blobs of a directory that only looks like a cache.
  fs::create_directories(Path("mine/blobs"));
  fs::rename(Path("private"), Path("mine/blobs/0"));
  fs::remove_all(Path(cache + "/blobs"));
  fs::create_directory_symlink(Path("mine/blobs"), Path(cache + "/blobs"));
  testing::internal::CaptureStderr();
  ASSERT_EQ(ImportHuggingFace(Path(snapshot), Path("again")), absl::OkStatus());
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("vocab.json is left out"));
  EXPECT_FALSE(fs::exists(Path("again/huggingface/vocab.json")));
}

}  // namespace
}  // namespace burst
