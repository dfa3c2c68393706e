// Tests the options that change a model of a Hugging Face directory: fields that do not count,
// RoPE, and tokens that are added.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "model/transformer.h"
#include "tests/train/config_arguments.h"
#include "tests/train/huggingface_fixture.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/huggingface/directory.h"
#include "train/huggingface/export.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

using testing::HasSubstr;

class ChangedModelTest : public HuggingFaceTest {
 protected:
  std::string Option(const std::string& name) { return "--model=" + Path(name); }

  void ExpectRefused(const std::vector<std::string>& arguments, const std::string& says) {
    EXPECT_THAT(std::string(Resolve(arguments).status().message()), HasSubstr(says));
  }
};

TEST_F(ChangedModelTest, IgnoredFieldsDoNotCountAndAreNotExported) {
  FakeDirectory fake = Fake("llama");
  fake.Write(Path("plain"));
  fake.config["mystery"] = 7;
  fake.config["partial_rotary_factor"] = 0.5;
  fake.Write(Path("from"));
  const std::vector<std::string> fields = {"mystery", "partial_rotary_factor"};
  ExpectRefused({Option("from")}, "partial_rotary_factor is 0.5");
  ExpectRefused({Option("from"), "--ignore_fields=partial_rotary_factor"},
                "mystery is not supported; --ignore_fields=mystery");
  ExpectRefused({Option("from"), "--ignore_fields=typo"}, "got 'typo'");
  ExpectRefused({"--model=d12", "--ignore_fields=typo"}, "--ignore_fields: must be empty");
  const auto config = Resolve({Option("from"), "--ignore_fields=mystery,partial_rotary_factor"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->pretrained->ignored, fields);

  ASSERT_EQ(ImportHuggingFace(Path("from"), Path("in"), fields), absl::OkStatus());
  ASSERT_EQ(ExportHuggingFace(CheckpointPath(Path("in")), Path("back"), {}), absl::OkStatus());
  EXPECT_EQ(nlohmann::json::parse(Content(Path("back/config.json"))),
            nlohmann::json::parse(Content(Path("plain/config.json"))));
  ExpectRefused({Option("in"), "--ignore_fields=mystery"}, "--ignore_fields must be empty");
}

TEST_F(ChangedModelTest, RopeOptions) {
  Fake("llama").Write(Path("llama"));  // a context of 32
  Fake("gpt2").Write(Path("gpt2"));
  const auto config = Resolve({Option("llama"), "--model.rope_theta=5e5", "--model.yarn_factor=4"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model.rope_theta, 5e5);
  EXPECT_EQ(config->model.rope_scaling.kind, RopeScaling::Kind::kYarn);
  EXPECT_EQ(config->model.rope_scaling.factor, 4);
  EXPECT_EQ(config->model.rope_scaling.first_context, 32);
  EXPECT_EQ(config->model.context, 128);
  const auto shorter =
      Resolve({Option("llama"), "--model.yarn_factor=4", "--model.yarn_context=16"});
  ASSERT_TRUE(shorter.ok()) << shorter.status();
  EXPECT_EQ(shorter->model.rope_scaling.first_context, 16);
  EXPECT_EQ(shorter->model.context, 64);
  ExpectRefused({Option("llama"), "--model.yarn_context=16"}, "--model.yarn_context: must be -1");
  ExpectRefused({"--model=llama_tiny", "--model.yarn_factor=4"},
                "--model.yarn_context: must be the");
  ExpectRefused({Option("gpt2"), "--model.yarn_factor=4"}, "--model.yarn_factor: must be -1");
  ExpectRefused({Option("gpt2"), "--model.rope_theta=4"}, "--model.rope_theta: must be -1");
}

TEST_F(ChangedModelTest, TheVocabularyGrowsWithinItsBounds) {
  Fake("llama").Write(Path("from"));  // 11 tokens
  ASSERT_EQ(ImportHuggingFace(Path("from"), Path("in")), absl::OkStatus());
  EXPECT_EQ(Resolve({Option("from"), "--model.vocab=16"})->model.vocab, 16);
  ExpectRefused({Option("from"), "--model.vocab=10"}, "--model.vocab: must be at least the 11");
  ExpectRefused({Option("in"), "--model.vocab=16"},
                "--model.vocab: must be the 11 tokens of the c");
}

// The rows of added tokens are the mean of the others, wherever they are.
TEST_F(ChangedModelTest, AddedRowsAreTheMean) {
  constexpr int64_t kRows = 11, kGrown = 14;
  for (const std::string name : {"llama", "qwen2", "gpt2"}) {
    SCOPED_TRACE(name);
    Fake(name).Write(Path(name));
    const Pretrained found = *FindPretrained(Path(name));
    ModelConfig grown = found.model;
    grown.vocab = kGrown;
    const auto make = [&](const ModelConfig& config, const StateSharding& sharding) {
      auto model = *Transformer::Create(config, DType::kFloat64, std::nullopt, DeviceType::kCpu, {},
                                        sharding);
      EXPECT_EQ(LoadPretrained(found, &model->parameters()), absl::OkStatus());
      return model;
    };
    const auto before = make(found.model, {}), after = make(grown, {});
    for (int i = 0; i < before->parameters().size(); ++i) {
      const Parameter& parameter = before->parameters()[i];
      std::vector<double> expected = parameter.variable.value().ToVector<double>();
      if (parameter.name == "embedding.tokens" || parameter.name == "head.weight") {
        const int64_t width = found.model.width;
        for (int64_t row = kRows; row < kGrown; ++row) {
          for (int64_t j = 0; j < width; ++j) {
            double sum = 0;
            for (int64_t i = 0; i < kRows; ++i) sum += expected[i * width + j];
            expected.push_back(sum / kRows);
          }
        }
      }
      const std::vector<double> values = after->parameters().variable(i).value().ToVector<double>();
      ASSERT_EQ(values.size(), expected.size()) << parameter.name;
      for (size_t j = 0; j < values.size(); ++j) {
        ASSERT_NEAR(values[j], expected[j], 1e-15) << parameter.name << " " << j;
      }
      for (int rank = 0; rank < 3; ++rank) {
        const auto part = make(grown, {3, 3, rank});
        const ParameterPiece piece = part->parameters().PieceOf(i, rank);
        EXPECT_EQ(part->parameters().Masters(i).ToVector<double>(),
                  std::vector<double>(values.begin() + piece.begin,
                                      values.begin() + piece.begin + piece.length));
      }
    }
  }
}

// An export of a changed model says what was changed, and keeps the numbers of special tokens.
TEST_F(ChangedModelTest, ExportsSayTheChanges) {
  FakeDirectory fake = Fake("qwen2");
  fake.config["eos_token_id"] = 7;
  fake.Write(Path("from"));
  ASSERT_EQ(ImportHuggingFace(Path("from"), Path("in")), absl::OkStatus());
  const auto config = Resolve({Option("from"), "--model.yarn_factor=4", "--model.vocab=13"});
  ASSERT_TRUE(config.ok()) << config.status();
  const auto model = *Transformer::Create(config->model, DType::kFloat32, 1);
  CheckpointInfo info = *ReadCheckpointInfo(CheckpointPath(Path("in")));
  info.model = config->model;
  info.seqlen = 64;
  ASSERT_EQ(SaveWeights(CheckpointPath(Path("in")), info, model->parameters().all(),
                        [&](const Parameter& parameter, const Tensor& whole) {
                          whole.CopyFrom(parameter.variable.value());
                          return absl::OkStatus();
                        }),
            absl::OkStatus());
  ASSERT_EQ(ExportHuggingFace(CheckpointPath(Path("in")), Path("back"), {}), absl::OkStatus());
  const auto json = nlohmann::json::parse(Content(Path("back/config.json")));
  EXPECT_EQ(json["max_position_embeddings"], 128);
  EXPECT_EQ(json["vocab_size"], 13);
  EXPECT_EQ(json["eos_token_id"], 7);
  EXPECT_EQ(json["rope_scaling"]["rope_type"], "yarn");
  EXPECT_EQ(json["rope_scaling"]["original_max_position_embeddings"], 32);
  EXPECT_EQ(json["model_type"], "qwen2");
  const auto back = HuggingFaceDirectory::Open(Path("back"));
  ASSERT_TRUE(back.ok()) << back.status();
  ModelConfig same = config->model.WithDefaults();
  EXPECT_EQ(ModelDifference(back->config().model, same), "");
}

// A run's own tokenizer is exported as files that transformers reads (tests/interop/
// own_tokenizers.py loads them there). Tokens of bytes are read again here.
TEST_F(ChangedModelTest, ExportsHaveTheRunsTokenizer) {
  Fake("llama").Write(Path("from"));
  ASSERT_EQ(ImportHuggingFace(Path("from"), Path("in")), absl::OkStatus());
  CheckpointInfo info = *ReadCheckpointInfo(CheckpointPath(Path("in")));
  info.model.vocab = 257;
  const auto model = *Transformer::Create(info.model, DType::kFloat32, 1);
  const absl::string_view text = "ab\n\xC3\xA9";
  const Tokenizer tokenizers[] = {Tokenizer::Byte(true), *Tokenizer::Char({&text, 1}, true),
                                  *Tokenizer::Char({&text, 1}, false)};
  for (int i = 0; i < 3; ++i) {
    const std::string out = Path(absl::StrCat("back", i));
    info.tokenizer = tokenizers[i];
    ASSERT_EQ(SaveWeights(CheckpointPath(Path("in")), info, model->parameters().all(),
                          [&](const Parameter& parameter, const Tensor& whole) {
                            whole.CopyFrom(parameter.variable.value());
                            return absl::OkStatus();
                          }),
              absl::OkStatus());
    std::filesystem::remove_all(Path("in/huggingface"));
    ASSERT_EQ(ExportHuggingFace(CheckpointPath(Path("in")), out, {}), absl::OkStatus());
    const auto json = nlohmann::json::parse(Content(out + "/tokenizer.json"));
    const auto settings = nlohmann::json::parse(Content(out + "/tokenizer_config.json"));
    const auto config = nlohmann::json::parse(Content(out + "/config.json"));
    EXPECT_EQ(settings["tokenizer_class"], "PreTrainedTokenizerFast");
    EXPECT_EQ(json["added_tokens"].size(), i < 2 ? 1u : 0u);
    EXPECT_EQ(settings.value("eos_token", ""), i < 2 ? "<|endoftext|>" : "");
    EXPECT_EQ(config["eos_token_id"], i == 0   ? nlohmann::json(256)
                                      : i == 1 ? nlohmann::json(4)
                                               : nlohmann::json());
    EXPECT_TRUE(config.contains("bos_token_id") && config["bos_token_id"].is_null());
    if (i > 0) {
      EXPECT_EQ(json["model"]["vocab"],
                (nlohmann::json{{"\n", 0}, {"a", 1}, {"b", 2}, {"\xC3\xA9", 3}}));
      continue;
    }
    const absl::StatusOr<Tokenizer> again = Tokenizer::Load(out);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->vocab(), 257);
    std::vector<int32_t> tokens;
    ASSERT_EQ(again->Encode("\n\xFF", &tokens), absl::OkStatus());
    EXPECT_EQ(tokens, (std::vector<int32_t>{10, 255}));
  }
}

}  // namespace
}  // namespace burst
