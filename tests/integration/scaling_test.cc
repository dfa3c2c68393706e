// Tests //benchmarks:scaling as users run it: its files and its errors. experiments_test tests its
// parts.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

using Json = nlohmann::json;

class Scaling : public testing::Test {
 protected:
  void SetUp() override { folder_ = FreshTestFolder(); }

  Result Run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), ProgramPath("benchmarks/scaling/scaling"));
    arguments.push_back("--device=cpu");
    return Subprocess(arguments, {folder_}).Wait();
  }
  // Runs it with mpirun's processes as ranks.
  Result RunProcesses(int count, const std::vector<std::string>& arguments) const {
    std::vector<std::string> command = {BURST_MPIRUN,
                                        "--oversubscribe",
                                        "-np",
                                        absl::StrCat(count),
                                        ProgramPath("benchmarks/scaling/scaling"),
                                        "--device=cpu"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return Subprocess(command, {folder_, /*mpi=*/true}).Wait();
  }

  // Returns the rows of an experiment that wrote to OUT, and checks the CSV and the plot.
  Json Rows(const std::string& experiment) const {
    const std::string path = absl::StrCat(folder_, "/OUT/", experiment);
    const Json json = Json::parse(ReadAll(path + ".json"), nullptr, false);
    if (!json.is_object() || !json["rows"].is_array()) return Json::array();
    std::istringstream csv(ReadAll(path + ".csv"));
    std::string line;
    std::getline(csv, line);
    const auto commas = std::count(line.begin(), line.end(), ',');
    EXPECT_EQ(commas + 1, static_cast<int64_t>(json["rows"][0].size()));
    size_t lines = 0;
    for (; std::getline(csv, line); ++lines) {
      EXPECT_EQ(std::count(line.begin(), line.end(), ','), commas) << line;
    }
    EXPECT_EQ(lines, json["rows"].size());
    EXPECT_TRUE(absl::StrContains(ReadAll(path + ".svg"), "<circle"));
    for (const char* key : {"experiment", "date", "machine", "layout"}) {
      EXPECT_TRUE(json.contains(key)) << key;
    }
    return json["rows"];
  }

  std::string folder_;
};

void ExpectSuccess(const Result& result) {
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.err, "");
}

TEST_F(Scaling, AttentionSendsTheBytesOfTheFormula) {
  const Result result =
      Run({"--seqlens=64,128", "--ranks=2", "--heads=2", "--head_dim=16", "--repeats=1",
           "--strategies=single,burst,ring", "--mask=causal", "--out=OUT"});
  ExpectSuccess(result);
  EXPECT_TRUE(absl::StrContains(result.out, "GFLOP/s")) << result.out;
  const Json rows = Rows("attention");
  ASSERT_EQ(rows.size(), 6u);
  std::set<std::string> strategies;
  for (const Json& row : rows) {
    strategies.insert(row["strategy"].get<std::string>());
    EXPECT_EQ(row["forward_bytes_per_rank"], row["forward_bytes_formula"]);
    EXPECT_EQ(row["backward_bytes_per_rank"], row["backward_bytes_formula"]);
    const bool several = row["ranks"] == 2;
    EXPECT_EQ(row["forward_bytes_formula"] > 0, several) << row;
    for (const char* key : {"forward_exposed", "forward_backward_efficiency"}) {
      EXPECT_EQ(row[key].is_number(), several) << row;
    }
    for (const char* key : {"forward_ms", "forward_gflops_per_rank", "forward_backward_ms",
                            "forward_backward_gflops_per_rank", "peak_mib_per_rank"}) {
      EXPECT_GT(row[key], 0) << key;
    }
  }
  EXPECT_EQ(strategies, (std::set<std::string>{"single", "burst", "ring"}));
}

TEST_F(Scaling, ProcessesAreRanks) {
  if (std::string(BURST_MPIRUN).empty()) GTEST_SKIP() << "built without Open MPI";
  const Result result =
      RunProcesses(3, {"--seqlens=64", "--ranks=1,2,3", "--heads=2", "--head_dim=16", "--repeats=1",
                       "--strategies=single,burst", "--out=OUT"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 9) << "said once";
  const Json rows = Rows("attention");
  ASSERT_EQ(rows.size(), 4u);
  for (const Json& row : rows) {
    EXPECT_EQ(row["forward_bytes_per_rank"], row["forward_bytes_formula"]);
    EXPECT_EQ(row["backward_bytes_per_rank"], row["backward_bytes_formula"]);
    EXPECT_EQ(row["forward_bytes_formula"] > 0, row["ranks"] > 1);
    EXPECT_GT(row["forward_backward_ms"], 0);
    EXPECT_EQ(row["forward_backward_efficiency"].is_number(), row["ranks"] > 1);
  }
  const Result too_many = RunProcesses(2, {"--ranks=3"});
  EXPECT_EQ(too_many.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(too_many.err, "error: --ranks: 3 ranks need as many processes"))
      << too_many.err;
  const Result models = RunProcesses(2, {"--experiment=training"});
  EXPECT_EQ(models.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(models.err, "--experiment: training")) << models.err;
}

TEST_F(Scaling, ADoubleRingSaysWhatLeavesANode) {
  ExpectSuccess(Run({"--seqlens=64", "--ranks=4", "--ranks_per_node=2", "--heads=2",
                     "--head_dim=16", "--repeats=1", "--strategies=single,burst", "--out=OUT"}));
  const Json rows = Rows("attention");
  ASSERT_EQ(rows.size(), 2u);
  for (const Json& row : rows) {
    EXPECT_EQ(row["between_nodes_bytes_per_rank"], row["between_nodes_bytes_formula"]);
    EXPECT_EQ(row["between_nodes_bytes_formula"] > 0, row["ranks"] == 4);
  }
}

TEST_F(Scaling, ErrorsOfNaiveAttentionOverARing) {
  ExpectSuccess(Run({"--experiment=error", "--tiles=off", "--seqlens=64", "--ranks=1,4",
                     "--heads=2", "--head_dim=16", "--strategies=burst,ring", "--out=OUT"}));
  const Json rows = Rows("error");
  ASSERT_EQ(rows.size(), 4u);
  for (const Json& row : rows) {
    for (const char* key : {"out", "dq", "dk", "dv"}) {
      EXPECT_GT(row[key], 0) << row;
      EXPECT_LT(row[key], 1e-5) << row;
    }
  }
}

TEST_F(Scaling, TileSizes) {
  const Result result = Run({"--tile_keys=16,1,1000", "--seqlens=64", "--heads=2", "--head_dim=16",
                             "--repeats=1", "--strategies=single,burst", "--out=OUT"});
  ExpectSuccess(result);
  EXPECT_TRUE(absl::StrContains(result.out, "  tile ")) << result.out;
  for (const char* experiment : {"attention", "error"}) {
    if (experiment == std::string("error")) {
      ExpectSuccess(Run({"--experiment=error", "--tile_keys=16,1,1000", "--seqlens=64", "--heads=2",
                         "--head_dim=16", "--strategies=single,burst", "--out=OUT"}));
    }
    const Json rows = Rows(experiment);
    ASSERT_EQ(rows.size(), 6u);
    std::multiset<int> sizes;
    for (const Json& row : rows) sizes.insert(row["tile_keys"].get<int>());
    EXPECT_EQ(sizes, (std::multiset<int>{1, 1, 16, 16, 1000, 1000}));
    EXPECT_TRUE(absl::StrContains(ReadAll(absl::StrCat(folder_, "/OUT/", experiment, ".svg")),
                                  "tile_keys"));
  }
  // The tile's column is there only if --tile_keys asks for it.
  const Result without = Run({"--experiment=error", "--seqlens=64", "--heads=2", "--head_dim=16",
                              "--strategies=single", "--out=OUT"});
  ExpectSuccess(without);
  EXPECT_FALSE(absl::StrContains(without.out, "  tile ")) << without.out;
  EXPECT_FALSE(Rows("error")[0].contains("tile_keys"));
}

constexpr char kTinyModel[] =
    R"(--model={"family":"llama","layers":2,"width":16,"heads":2,"kv_heads":1,"ffn":32})";

TEST_F(Scaling, PrefillOfAModel) {
  ExpectSuccess(Run({"--experiment=prefill", kTinyModel, "--seqlens=64", "--ranks=2",
                     "--strategies=single,burst+ulysses,tp,tp+sp", "--repeats=1", "--out=OUT"}));
  const Json rows = Rows("prefill");
  ASSERT_EQ(rows.size(), 4u);
  for (const Json& row : rows) EXPECT_GT(row["latency_ms"], 0);
}

TEST_F(Scaling, GenerationOfAModel) {
  for (const std::string family : {"llama", "gpt2"}) {
    const std::string model = absl::StrCat(
        R"(--model={"layers":2,"width":16,"heads":2,"ffn":32,"family":")", family, "\"}");
    ExpectSuccess(Run({"--experiment=generation", model, "--seqlens=64", "--ranks=2,3",
                       "--strategies=single,burst", "--tokens=5", "--ffn_chunk=16", "--out=OUT"}));
    const Json rows = Rows("generation");
    ASSERT_EQ(rows.size(), 3u);
    for (const Json& row : rows) {
      EXPECT_GT(row["first_ms"], 0);
      EXPECT_GT(row["token_ms"], 0);
    }
    // Keys and values have 64 tokens, 2 layers and 16 channels in fp32. With zigzag, the first of 3
    // ranks has the longest chunks.
    const double all = 2.0 * 2 * 64 * 16 * 4 / (1 << 20);
    EXPECT_DOUBLE_EQ(rows[0]["cache_mib_per_rank"], all);
    EXPECT_DOUBLE_EQ(rows[1]["cache_mib_per_rank"], all / 2);
    EXPECT_DOUBLE_EQ(rows[2]["cache_mib_per_rank"], all * 22 / 64);
  }
}

TEST_F(Scaling, TrainingHasTheLossesOfOneRank) {
  std::string text;
  for (int i = 0; i < 400; ++i) absl::StrAppend(&text, "line ", i * 7919 % 1000, " of a text\n");
  std::ofstream(folder_ + "/text.txt") << text;
  ExpectSuccess(
      Run({"--experiment=training", kTinyModel, "--data=text.txt", "--seqlens=32", "--batches=2",
           "--steps=4", "--ranks=2", "--strategies=single,burst,ring,tp,tp+sp", "--out=OUT"}));
  const Json rows = Rows("training");
  ASSERT_EQ(rows.size(), 5u);
  for (const Json& row : rows) {
    EXPECT_GT(row["step_ms"], 0);
    EXPECT_GT(row["perplexity"], 1);
    EXPECT_LT(row["loss_difference"], 1e-5);  // as the trainer's parity tests
  }
}

TEST_F(Scaling, RecomputationIsAColumnAndChangesNoLoss) {
  std::string text;
  for (int i = 0; i < 400; ++i) absl::StrAppend(&text, "line ", i * 7919 % 1000, " of a text\n");
  std::ofstream(folder_ + "/text.txt") << text;
  ExpectSuccess(Run({"--experiment=training", kTinyModel, "--data=text.txt", "--seqlens=32",
                     "--batches=1", "--steps=3", "--ranks=2", "--strategies=single,burst",
                     "--recompute=none,selective,full", "--out=OUT"}));
  const Json rows = Rows("training");
  ASSERT_EQ(rows.size(), 6u);
  for (size_t i = 0; i < rows.size(); ++i) {
    const char* const names[] = {"none", "selective", "full"};
    EXPECT_EQ(rows[i]["recompute"], names[i % 3]);
    EXPECT_EQ(rows[i]["batch"], 1) << "given, though it is another experiment's default";
    EXPECT_EQ(rows[i]["loss"], rows[i - i % 3]["loss"]) << "to the bit";
    EXPECT_EQ(rows[i]["val_loss"], rows[i - i % 3]["val_loss"]);
  }
}

TEST_F(Scaling, ErrorsNameTheirOption) {
  const struct {
    std::vector<std::string> arguments;
    std::vector<std::string> parts;
  } cases[] = {
      {{"--seqlens=64,x"}, {"--seqlens", "'x'"}},
      {{"--batches=0"}, {"--batches"}},
      {{"--ranks=2,2"}, {"--ranks", "twice"}},
      {{"--strategies=burst,rign"}, {"--strategies", "rign", "single, burst, ring"}},
      {{"--heads=3", "--kv_heads=2"}, {"--kv_heads", "2", "3"}},
      {{"--head_dim=0"}, {"--head_dim"}},
      {{"--strategies=ulysses", "--heads=3"}, {"--ranks", "1, 3", "3 heads"}},
      {{"--strategies=tp", "--heads=3"}, {"--ranks", "1, 3", "3 heads"}},
      {{"--strategies=burst,tp+sp", "--experiment=error"}, {"--strategies", "tp+sp", "error"}},
      {{"--experiment=training", "--strategies=tp", "--ranks=4"}, {"--tp", "4", "6 heads"}},
      {{"--strategies=burst+ulysses", "--ulysses=3"}, {"--ulysses", "2 ranks"}},
      {{"--ulysses=2"}, {"--ulysses", "burst+ulysses"}},
      {{"--ring_grad_dtype=fp16"}, {"--ring_grad_dtype", "fp16", "one of fp32, bf16"}},
      {{"--ring_grad_dtype=bf16"}, {"--ring_grad_dtype", "float32", "--dtype=bf16"}},
      {{"--strategies=ulysses", "--ring_grad_dtype=bf16"}, {"--ring_grad_dtype", "rings"}},
      {{"--ranks_per_node=-1"}, {"--ranks_per_node", "-1"}},
      {{"--ranks=4", "--ranks_per_node=3"}, {"--ranks_per_node", "3", "4 ranks"}},
      {{"--strategies=ulysses", "--ranks_per_node=2"}, {"--ranks_per_node", "rings"}},
      {{"--strategies=burst+ulysses", "--ranks=4", "--ulysses=2", "--ranks_per_node=1"},
       {"--ranks_per_node", "groups of 2"}},
      {{"--strategies=ring", "--ring_backward=burst"}, {"--ring_backward", "--strategies"}},
      {{"--ring_backward=sideways"}, {"--ring_backward", "sideways"}},
      {{"--heads=two"}, {"--heads", "a whole number"}},
      {{"--mask=window"}, {"--mask", "causal"}},
      {{"--layout=spiral"}, {"--layout", "zigzag"}},
      {{"--tiles=maybe"}, {"--tiles", "off"}},
      {{"--tile_keys=64,0"}, {"--tile_keys", "'0'"}},
      {{"--tile_keys=64", "--tiles=off"}, {"--tile_keys", "--tiles=off"}},
      {{"--tile_keys=64", "--experiment=training"}, {"--tile_keys", "--experiment=training"}},
      {{"--tile_keys=64", "--experiment=prefill"}, {"--tile_keys", "--experiment=prefill"}},
      {{"--dtype=int8"}, {"--dtype", "bf16"}},
      {{"--dtype=bf16", "--tiles=off"}, {"--tiles", "bfloat16"}},
      {{"--repeats=0"}, {"--repeats"}},
      {{"--threads=0"}, {"--threads"}},
      {{"--seqlen=64"}, {"--seqlen", "did you mean --seqlens"}},
      {{"--recompute=none,half", "--experiment=training"},
       {"--recompute", "half", "none, full, selective, sequence; got 'half'"}},
      {{"--recompute=full,full", "--experiment=training"}, {"--recompute", "twice"}},
      {{"--recompute=full"}, {"--recompute", "--experiment=attention"}},
      {{"--recompute=full", "--experiment=prefill"}, {"--recompute", "prefill"}},
      {{"--recompute=full", "--experiment=error"}, {"--recompute", "error"}},
      {{"--experiment=speed"}, {"--experiment", "prefill"}},
      {{"--experiment=generation", "--strategies=tp"}, {"--strategies", "tp", "generation"}},
      {{"--experiment=generation", "--tokens=0"}, {"--tokens", "0 is less than 1"}},
      {{"--experiment=prefill", "--tokens=4"}, {"--tokens", "--experiment=prefill"}},
      {{"--zero=1"}, {"--zero", "--experiment=attention"}},
      {{"--zero=1", "--experiment=training", "--strategies=single"}, {"--zero", "one rank"}},
      {{"--recompute_segment=2", "--experiment=training"}, {"--recompute_segment", "--recompute"}},
      {{"--ffn_chunk=1", "--experiment=attention"}, {"--ffn_chunk", "attention"}},
      {{"--model=d12"}, {"--model", "--experiment=attention"}},
      {{"--experiment=training", "--heads=8"}, {"--heads", "--experiment=training"}},
      {{"--experiment=prefill", "--model=nonsense"}, {"--model", "nonsense"}},
  };
  for (const auto& c : cases) {
    const Result result = Run(c.arguments);
    EXPECT_EQ(result.exit_code, 2) << c.arguments[0] << result.out << result.err;
    EXPECT_TRUE(absl::StartsWith(result.err, "error: ")) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    for (const std::string& part : c.parts) {
      EXPECT_TRUE(absl::StrContains(result.err, part)) << part << " is missing in " << result.err;
    }
    EXPECT_EQ(result.out, "");
  }
  const Result unwritable = Run({"--seqlens=8", "--repeats=1", "--out=/dev/null/OUT"});
  EXPECT_EQ(unwritable.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(unwritable.err, "--out")) << unwritable.err;
  EXPECT_EQ(unwritable.out, "") << "nothing is measured in vain";
  const Result help = Run({"--help"});
  ExpectSuccess(help);
  EXPECT_TRUE(absl::StrContains(help.out, "--strategies")) << help.out;
}

}  // namespace
}  // namespace burst
