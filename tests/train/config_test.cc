#include "train/config/config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/train/config_arguments.h"

namespace burst {
namespace {

// Returns every option as text.
std::vector<std::string> Texts(TrainConfig config) {
  std::vector<std::string> texts;
  const OptionTable table = TrainOptions(&config);
  for (const Option& option : table.options()) texts.push_back(option.get());
  return texts;
}

TEST(TrainConfig, DefaultsAreThoseOfTheStruct) {
  const auto config = Parse({});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(Texts(*config), Texts(TrainConfig()));
}

TEST(TrainConfig, EveryOptionIsInTheHelpAndInTheJson) {
  const std::string help = TrainHelp();
  TrainConfig config;
  const OptionTable options = TrainOptions(&config);
  const auto json = nlohmann::json::parse(options.ToJson());
  for (const Option& option : options.options()) {
    EXPECT_TRUE(absl::StrContains(help, "\n  --" + option.name)) << option.name;
    const bool saved = option.name != "out" && option.name != "resume" && option.name != "config" &&
                       option.name != "profile_steps";
    EXPECT_EQ(json.contains(option.name), saved) << option.name;
  }
}

TEST(TrainConfig, DefaultsResolve) {
  const auto config = Resolve({});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->ranks, 2);
  EXPECT_EQ(config->threads, 4);
  EXPECT_EQ(config->model_name, "llama_tiny");
  EXPECT_EQ(config->data, "kjv");
  EXPECT_DOUBLE_EQ(config->lr.min_lr, config->lr.lr / 10);
  EXPECT_GT(config->lr.warmup, 0);
}

TEST(TrainConfig, ChangedScoresAreTheModelsUnlessGiven) {
  const std::string model =
      R"(--model={"layers":1,"width":8,"heads":2,"attention_dropout":0.25,"attention_softcap":50})";
  const auto own = Resolve({model}),
             given =
                 Resolve({model, "--model.attention_dropout=0", "--model.attention_softcap=20"});
  ASSERT_TRUE(own.ok() && given.ok()) << own.status() << given.status();
  EXPECT_EQ(own->model.attention_dropout, 0.25);
  EXPECT_EQ(own->model.attention_softcap, 50);
  EXPECT_EQ(own->AttentionOptions().scores.dropout, 0.25);
  EXPECT_EQ(own->AttentionOptions().scores.softcap, 50);
  EXPECT_EQ(given->AttentionOptions().scores.dropout, 0);
  EXPECT_EQ(given->AttentionOptions().scores.softcap, 20);
  EXPECT_EQ(NameOfFirst(Resolve({})->AttentionOptions().scores, /*wants_max_logits=*/false),
            nullptr);
}

TEST(TrainConfig, SinksAreTheModelsOrGiven) {
  const std::string with = R"(--model={"layers":1,"width":8,"heads":2,"attention_sinks":true})",
                    without = R"(--model={"layers":1,"width":8,"heads":2})";
  for (const auto& [model, given, has] :
       {std::tuple(with, "--nomodel.attention_sinks", true),
        std::tuple(with, "--model.attention_sinks", true),
        std::tuple(without, "--model.attention_sinks", true),
        std::tuple(without, "--nomodel.attention_sinks", false),
        std::tuple(std::string("--model=nanogpt_cpu"), "--model.attention_sinks", true)}) {
    const auto config = Resolve({model, given});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->model.attention_sinks, has) << model << " " << given;
  }
  EXPECT_TRUE(Resolve({"--model.attention_sinks", "--exact"}).ok());
}

TEST(TrainConfig, WaysToWriteAnOption) {
  const auto config = Parse({"--steps=7", "-lr", "0.5", "--packed", "--nodeterministic", "--layout",
                             "striped", "--model.dropout", "-1"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->steps, 7);
  EXPECT_EQ(config->lr, 0.5);
  EXPECT_TRUE(config->packed);
  EXPECT_FALSE(config->deterministic);
  EXPECT_EQ(config->layout, Layout::kStriped);
}

// A run's length is steps, tokens or epochs. The rates follow it.
TEST(TrainConfig, TheLengthOfARun) {
  const std::vector<std::string> step = {"--seqlen=100", "--batch=4", "--accumulate=2"};
  const auto resolve = [&](const std::string& length) {
    std::vector<std::string> arguments = step;
    if (!length.empty()) arguments.push_back(length);
    auto config = Resolve(arguments);
    EXPECT_TRUE(config.ok()) << config.status();
    return *config;
  };
  EXPECT_EQ(resolve("").steps, 1000);
  EXPECT_EQ(resolve("--steps=7").steps, 7);
  for (const auto& [tokens, steps] :
       {std::pair(1, 1), std::pair(800, 1), std::pair(801, 2), std::pair(80000, 100)}) {
    const auto config = resolve(absl::StrCat("--tokens=", tokens));
    EXPECT_EQ(config.steps, steps) << tokens;
    EXPECT_EQ(config.lr.steps, steps);
    EXPECT_EQ(config.lr.warmup, steps / 20);
  }
  // An epoch of 30 sequences is 3.75 steps.
  for (const auto& [epochs, steps] : {std::pair("1", 4), std::pair("2", 8), std::pair("0.5", 2),
                                      std::pair("8", 30), std::pair("0.001", 1)}) {
    ResolvedConfig config = resolve(absl::StrCat("--epochs=", epochs));
    ASSERT_EQ(config.SetEpochs(30), absl::OkStatus());
    EXPECT_EQ(config.steps, steps) << epochs;
    EXPECT_EQ(config.lr.steps, steps);
    // A resumed run computes its steps anew.
    EXPECT_EQ(nlohmann::json::parse(config.ToJson())["steps"], -1);
  }
  ResolvedConfig steps = resolve("--steps=7");
  ASSERT_EQ(steps.SetEpochs(30), absl::OkStatus());
  EXPECT_EQ(steps.steps, 7);
  ResolvedConfig long_warmup = *Resolve({"--epochs=1", "--warmup=20"});
  EXPECT_TRUE(absl::StrContains(long_warmup.SetEpochs(30).message(), "--warmup"));
  ResolvedConfig endless = resolve("--epochs=1e6");
  EXPECT_TRUE(absl::StrContains(endless.SetEpochs(int64_t{1} << 60).message(), "--epochs"));
}

TEST(TrainConfig, CommandLineWinsOverTheFile) {
  const std::string file =
      Write("config.json",
            R"({"steps": 11, "lr": 0.25, "packed": true, "layout": "striped", "recompute": "full",
                               "model": {"family": "gpt2", "layers": 1, "width": 8, "heads": 2}})");
  for (const auto& arguments : {std::vector<std::string>{"--config=" + file, "--steps=12"},
                                std::vector<std::string>{"--steps=12", "--config", file}}) {
    const auto config = Resolve(arguments);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->steps, 12);
    EXPECT_EQ(config->lr.lr, 0.25);
    EXPECT_TRUE(config->packed);
    EXPECT_EQ(config->layout, Layout::kStriped);
    EXPECT_EQ(config->recompute, Recompute::kFull);
    EXPECT_EQ(config->model.family, Family::kGpt2);
    EXPECT_EQ(config->model_name, "custom");
  }
}

// The last source says how long a run is: the run, a file, the command line. Two lengths in one
// source contradict each other.
TEST(TrainConfig, TheLastOfTheAlternativesWins) {
  const std::string file = Write("length.json", R"({"steps": 11})");
  const auto config = Resolve({"--config=" + file, "--tokens=100000"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->tokens, 100000);
  const auto both = Resolve({"--steps=11", "--tokens=100000"});
  EXPECT_TRUE(absl::StrContains(both.status().message(), "leave it out, or give --tokens=0"))
      << both.status();

  const std::string folder = testing::TempDir() + "/length";
  std::filesystem::create_directories(folder);
  Write("length/config.json", Resolve({"--tokens=100000"})->ToJson());
  const auto resume = [&](const std::string& given) {
    return Resolve({"--resume", "--out=" + folder, given});
  };
  const auto steps = resume("--steps=8");
  ASSERT_TRUE(steps.ok()) << steps.status();
  EXPECT_EQ(steps->steps, 8);
  EXPECT_EQ(steps->tokens, 0);
  const auto epochs = resume("--epochs=2");
  ASSERT_TRUE(epochs.ok()) << epochs.status();
  EXPECT_EQ(epochs->epochs, 2);
  EXPECT_EQ(epochs->tokens, 0);
  const auto as_before = resume("--steps=-1");
  ASSERT_TRUE(as_before.ok()) << as_before.status();
  EXPECT_EQ(as_before->tokens, 100000);
}

TEST(TrainConfig, AFileMayHaveTheNamesOfEarlierVersions) {
  const auto config = Resolve({"--config=" + Write("before.json", R"({"dropout": 0.25,
      "attention_dropout": 0.5, "attention_softcap": 20, "attention_sinks": true,
      "recompute_every": 2})")});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model.dropout, 0.25);
  EXPECT_EQ(config->model.attention_dropout, 0.5);
  EXPECT_EQ(config->model.attention_softcap, 20);
  EXPECT_TRUE(config->model.attention_sinks);
}

TEST(TrainConfig, JsonIsAConfigFile) {
  const std::string model =
      Write("tiny.json", R"({"family": "llama", "layers": 1, "width": 8, "heads": 2})");
  const auto config =
      Resolve({"--model=" + model, "--lr=0.0123", "--seed=9", "--ring_backward=ring",
               "--data=/x/y.txt", "--schedule=wsd", "--tokenizer=byte"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model_name, "tiny");
  const std::string json = config->ToJson();
  std::remove(model.c_str());  // its content is in the JSON
  const auto again = Resolve({"--config=" + Write("again.json", json)});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->ToJson(), json);
  EXPECT_EQ(again->model.width, 8);
}

TEST(TrainConfig, RelativePathsStartWhereTheCommandIsGiven) {
  setenv("BUILD_WORKING_DIRECTORY", "/where/I/am", 1);
  const auto config = Resolve({"--data=a/*.bin", "--val_data=../b.bin", "--out=run"});
  unsetenv("BUILD_WORKING_DIRECTORY");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->data, "/where/I/am/a/*.bin");
  EXPECT_EQ(config->val_data, "/where/I/b.bin");
  EXPECT_EQ(config->out, "/where/I/am/run");
}

TEST(TrainConfig, MpiTakesItsRanksFromTheLaunch) {
  const auto config = Resolve({"--comm=mpi"}, {4, 3});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->ranks, 4);
  EXPECT_EQ(config->threads, 3);
  EXPECT_TRUE(Resolve({"--comm=mpi", "--ranks=4"}, {4, 3}).ok());
}

TEST(TrainConfig, CommFollowsTheLaunch) {
  const auto comm = [](const std::vector<std::string>& arguments, const Launch& launch) {
    const auto config = Resolve(arguments, launch);
    EXPECT_TRUE(config.ok()) << config.status();
    return config.ok() ? config->comm : CommKind::kThreads;
  };
  EXPECT_EQ(comm({}, {1, 8}), CommKind::kThreads);
  EXPECT_EQ(comm({}, {1, 8, 4}), CommKind::kThreads);
  EXPECT_EQ(comm({}, {4, 8, 4}), CommKind::kNccl);
  EXPECT_EQ(comm({"--comm=mpi"}, {4, 8, 4}), CommKind::kMpi);  // so the device is the CPU
  EXPECT_EQ(Resolve({"--comm=mpi"}, {4, 8, 4})->device, DeviceType::kCpu);
  for (const char* launcher : {"mpirun", "torchrun", "srun"}) {
    EXPECT_EQ(comm({}, {4, 8, 0, launcher}), CommKind::kTcp);
    EXPECT_EQ(comm({"--device=cpu"}, {4, 8, 4, launcher}), CommKind::kTcp);
  }
  EXPECT_EQ(comm({"--comm=tcp"}, {4, 8, 4}), CommKind::kTcp);
  EXPECT_EQ(Resolve({"--comm=tcp"}, {4, 8, 4})->device, DeviceType::kCpu);
  EXPECT_EQ(comm({"--comm=mpi"}, {4, 8}), CommKind::kMpi);
  // Threads do not depend on a launcher's environment, and MPI does not depend on its token.
  const Launch confused = {1, 8, 4, "", absl::InvalidArgumentError("RANK is not set")};
  EXPECT_EQ(comm({"--comm=threads"}, confused), CommKind::kThreads);
  Launch no_token = {4, 8};
  no_token.token_error = absl::InvalidArgumentError("BURST_TOKEN is not set");
  EXPECT_EQ(comm({"--comm=mpi"}, no_token), CommKind::kMpi);
}

TEST(TrainConfig, MeshOfRanks) {
  const auto mesh = [](const std::vector<std::string>& arguments, const Launch& launch = {1, 8}) {
    const auto config = Resolve(arguments, launch);
    EXPECT_TRUE(config.ok()) << config.status();
    return config.ok() ? std::tuple(config->mesh.data, config->mesh.stages, config->mesh.sequence,
                                    config->mesh.tensor)
                       : std::tuple(0, 0, 0, 0);
  };
  EXPECT_EQ(mesh({"--ranks=4"}), std::tuple(1, 1, 4, 1));
  EXPECT_EQ(mesh({"--ranks=4", "--dp=2"}), std::tuple(2, 1, 2, 1));
  EXPECT_EQ(mesh({"--ranks=4", "--sp=1"}), std::tuple(4, 1, 1, 1));
  EXPECT_EQ(mesh({"--dp=2", "--sp=3"}), std::tuple(2, 1, 3, 1));
  EXPECT_EQ(mesh({"--dp=2"}), std::tuple(2, 1, 1, 1));
  EXPECT_EQ(mesh({"--sp=3"}), std::tuple(1, 1, 3, 1));
  EXPECT_EQ(mesh({"--dp=4"}, {8, 8, 8}), std::tuple(4, 1, 2, 1));
  EXPECT_EQ(mesh({"--tp=2"}), std::tuple(1, 1, 1, 2));
  EXPECT_EQ(mesh({"--tp=2", "--ranks=8"}), std::tuple(1, 1, 4, 2));
  EXPECT_EQ(mesh({"--tp=2", "--ranks=8", "--dp=2"}), std::tuple(2, 1, 2, 2));
  EXPECT_EQ(mesh({"--dp=2", "--sp=3", "--tp=2", "--pp=2"}), std::tuple(2, 2, 3, 2));
  EXPECT_EQ(mesh({"--tp=2", "--strategy=single"}), std::tuple(1, 1, 1, 2));
}

TEST(TrainConfig, StrategiesChooseTheirRanks) {
  const std::string model =
      R"(--model={"family": "llama", "layers": 1, "width": 16, "heads": 8, "kv_heads": 2})";
  const auto resolve = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> all = arguments;
    all.push_back(model);
    const auto config = Resolve(all);
    EXPECT_TRUE(config.ok()) << config.status();
    return config.ok() ? std::tuple(config->mesh.data, config->mesh.sequence, config->ulysses)
                       : std::tuple(0, 0, 0);
  };
  EXPECT_EQ(resolve({"--strategy=single"}), std::tuple(1, 1, 1));
  EXPECT_EQ(resolve({"--strategy=single", "--dp=2"}), std::tuple(2, 1, 1));
  EXPECT_EQ(resolve({"--strategy=ring", "--ring_backward=ring"}), std::tuple(1, 2, 1));
  EXPECT_EQ(resolve({"--strategy=ulysses", "--ranks=8"}), std::tuple(1, 8, 1));
  EXPECT_EQ(resolve({"--strategy=burst+ulysses", "--ranks=6"}), std::tuple(1, 6, 2));
  EXPECT_EQ(resolve({"--strategy=burst+ulysses", "--ranks=4", "--ulysses=4"}), std::tuple(1, 4, 4));
  EXPECT_EQ(resolve({"--strategy=burst+ulysses", "--dp=2", "--sp=4", "--ring_backward=burst"}),
            std::tuple(2, 4, 2));
}

TEST(TrainConfig, NodesOfADoubleRing) {
  const std::string model =
      R"(--model={"family": "llama", "layers": 1, "width": 16, "heads": 8, "kv_heads": 2})";
  const auto per_node = [&](std::vector<std::string> arguments, int processes = 1, int here = 0) {
    arguments.push_back(model);
    Launch launch = {processes, 8};
    launch.ranks_per_node = here;
    const auto config = Resolve(arguments, launch);
    EXPECT_TRUE(config.ok()) << config.status();
    return config.ok() ? config->ranks_per_node : -1;
  };
  EXPECT_EQ(per_node({"--ranks=4"}), 0);
  EXPECT_EQ(per_node({"--ranks=4", "--ranks_per_node=2"}), 2);
  EXPECT_EQ(per_node({"--ranks=4", "--ranks_per_node=4"}), 4);
  EXPECT_EQ(per_node({"--dp=2", "--sp=4", "--ranks_per_node=2", "--strategy=ring"}), 2);
  EXPECT_EQ(per_node({"--ranks=8", "--ranks_per_node=4", "--strategy=burst+ulysses"}), 4);
  // A launcher's hosts count for processes, if a sequence is on several hosts and the option does
  // not say otherwise.
  EXPECT_EQ(per_node({"--comm=mpi"}, 8, 4), 4);
  EXPECT_EQ(per_node({"--comm=mpi"}, 4, 4), 0);
  EXPECT_EQ(per_node({"--comm=mpi", "--ranks_per_node=0"}, 8, 4), 0);
  EXPECT_EQ(per_node({"--comm=mpi", "--ranks_per_node=2"}, 8, 4), 2);
  EXPECT_EQ(per_node({"--comm=mpi", "--dp=2"}, 8, 4), 0);
  EXPECT_EQ(per_node({"--comm=mpi", "--dp=2", "--sp=6"}, 12, 4), 0);
  EXPECT_EQ(per_node({"--comm=mpi", "--strategy=ulysses"}, 8, 4), 0);
  EXPECT_EQ(per_node({"--comm=mpi", "--strategy=burst+ulysses", "--ulysses=2"}, 6, 3), 0);
}

TEST(TrainConfig, RingGradientsAreBFloat16WhereActivationsAre) {
  const auto resolves = [](const std::vector<std::string>& arguments) {
    return Resolve(arguments, {1, 8, 4}).ok();
  };
  EXPECT_TRUE(resolves({"--ring_grad_dtype=bf16", "--ranks=4"}));  // on GPUs
  EXPECT_FALSE(resolves({"--ring_grad_dtype=bf16", "--precision=tf32"}));
  EXPECT_FALSE(resolves({"--ring_grad_dtype=bf16", "--device=cpu"}));
}

// The chunk is a multiple of 16 that divides the sequence, into 8 chunks if possible.
TEST(TrainConfig, AnExactRunHasChunks) {
  const auto chunk = [](int64_t seqlen) {
    const auto config = Resolve({"--exact", absl::StrCat("--seqlen=", seqlen)});
    EXPECT_EQ(config.status(), absl::OkStatus());
    return config.ok() ? config->exact_chunk : 0;
  };
  EXPECT_EQ(chunk(16), 16);
  EXPECT_EQ(chunk(96), 16);
  EXPECT_EQ(chunk(256), 32);
  EXPECT_EQ(chunk(1024), 128);
  EXPECT_EQ(chunk(16384), 2048);
  EXPECT_EQ(chunk(16 * 1009), 16);  // a prime number of multiples of 16
  EXPECT_EQ(chunk(1 << 20), 8192);
  EXPECT_EQ(Resolve({})->exact_chunk, 0);
  EXPECT_EQ(Resolve({"--exact", "--exact_chunk=64"})->exact_chunk, 64);
  EXPECT_EQ(Resolve({"--exact", "--exact_chunk=1024", "--dp=2"})->exact_chunk, 1024);
}

TEST(TrainConfig, TheStateIsDividedByThoseThatHaveTheSame) {
  EXPECT_EQ(Resolve({})->zero, 0);
  const auto ranks = [](const std::vector<std::string>& arguments) {
    const auto config = Resolve(arguments);
    EXPECT_EQ(config.status(), absl::OkStatus());
    return config.ok() ? config->state_ranks() : 0;
  };
  EXPECT_EQ(ranks({"--zero=1", "--ranks=4"}), 4);
  EXPECT_EQ(ranks({"--zero=1", "--ranks=8", "--pp=2"}), 4);
  EXPECT_EQ(ranks({"--zero=2", "--dp=2", "--sp=3"}), 6);
  EXPECT_EQ(ranks({"--zero=3", "--dp=4", "--sp=1", "--tp=2"}), 4);
  EXPECT_EQ(ranks({"--zero=3", "--dp=2", "--sp=2", "--tp=2"}), 4);
}

}  // namespace
}  // namespace burst
