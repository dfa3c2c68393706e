// bazel run //train:evaluate: evaluates a model over long contexts.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/enum_names.h"
#include "burst/base/json.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "burst/comm/agreement.h"
#include "train/config/config.h"
#include "train/data/corpus.h"
#include "train/evaluate/choices.h"
#include "train/evaluate/needle.h"
#include "train/evaluate/perplexity.h"
#include "train/evaluate/scorer.h"
#include "train/generate/loaded_model.h"
#include "train/generate/prompt.h"

namespace burst {
namespace {

enum class Task { kPerplexity, kNeedle, kChoices };
constexpr EnumName<Task> kTasks[] = {
    {Task::kPerplexity, "perplexity"}, {Task::kNeedle, "needle"}, {Task::kChoices, "choices"}};

absl::StatusOr<int64_t> ParsePercent(absl::string_view text) {
  int64_t value = 0;
  BURST_RETURN_IF_ERROR(ParseOption(text, &value));
  if (value >= 0 && value <= 100) return value;
  return absl::InvalidArgumentError(absl::StrCat("must be from 0 to 100; got ", text));
}

struct EvaluateConfig {
  ModelOptions model;
  Task task = Task::kPerplexity;
  std::string data, out = "evaluation";
  PerplexityOptions perplexity{/*seqlen=*/-1, /*sequences=*/16};
  NeedleOptions needle{{}, {0, 25, 50, 75, 100}, /*trials=*/5, /*seed=*/1};
  int64_t seed = 1;
};

// The options that only one task has.
constexpr std::pair<const char*, Task> kOfTask[] = {
    {"seqlen", Task::kPerplexity},    {"sequences", Task::kPerplexity},
    {"documents", Task::kPerplexity}, {"last", Task::kPerplexity},
    {"lengths", Task::kNeedle},       {"depths", Task::kNeedle},
    {"trials", Task::kNeedle},        {"seed", Task::kNeedle}};

void AddTaskOptions(EvaluateConfig* c, OptionTable* t) {
  t->Add("seqlen", &c->perplexity.seqlen)
      .Min(1)
      .Or(-1)
      .Unit("tokens")
      .Help(
          "Evaluate perplexity in sequences of N tokens. -1: those that the model was trained "
          "with.");
  t->Add("sequences", &c->perplexity.sequences)
      .Min(0)
      .Help("Evaluate perplexity in at most N sequences. 0: all of the data.");
  t->Add("documents", &c->perplexity.documents)
      .Help("Begin sequences with documents, and skip shorter documents.");
  t->Add("last", &c->perplexity.last)
      .Min(0)
      .Unit("tokens")
      .Help(
          "Predict the same tokens from the last N/2 to N tokens alone, too, which shows what the "
          "longer context gives. 0: not.");
  t->AddList("lengths", &c->needle.lengths, ParseCount)
      .Help(
          "Hide the needle in texts of these numbers of tokens. Empty: an eighth of the context, a "
          "quarter, a half, all of it.");
  t->AddList("depths", &c->needle.depths, ParsePercent)
      .Help("Hide the needle behind these shares of the text, in percent.");
  t->Add("trials", &c->needle.trials)
      .Min(1)
      .Help("Hide N needles for each length and depth, in other places of the data.");
  t->Add("seed", &c->seed).Min(0).Help("Hide other needles with another seed.");
}

OptionTable Options(EvaluateConfig* c) {
  OptionTable t;
  t.Group("Options");
  AddSourceOptions(&c->model, &t);
  t.Add("task", &c->task, kTasks)
      .Help(
          "Evaluate perplexity by position, the search for a needle in a haystack, or the choices "
          "of a .jsonl file.");
  t.Add("data", &c->data)
      .Help(
          "Read texts as //train does; or, for choices, lines {\"context\", \"choices\", "
          "\"answer\"} with the answer's index, or {\"text\"} whose last word is to be found.");
  t.Add("out", &c->out).Of(Scope::kHost).Help("Write NAME.json and, with a plot, NAME.svg.");
  AddTaskOptions(c, &t);
  AddRankOptions(&c->model, &t);
  const OptionTable train = TrainOptions(&c->model.train);
  t.AddShared(train, "field");
  t.AddShared(train, "data_cache")
      .Help(
          "Keep tokens of texts and scans of shards in this folder. Empty: .data-cache next to "
          "--out.");
  return t;
}

// Whether the file holds the result of a task.
bool IsEvaluation(const std::string& path) {
  const absl::StatusOr<std::string> content = ReadFile(path);
  if (!content.ok()) return false;
  const absl::StatusOr<nlohmann::json> json = ParseJson(*content);
  return json.ok() && json->is_object() &&
         (json->contains("by_range") || json->contains("found") || json->contains("by_question"));
}

// Refuses to replace files that no evaluation wrote, such as a model's config.json.
absl::Status CheckOut(const EvaluateConfig& c) {
  const std::string json = ResolvePath(c.out) + ".json", svg = ResolvePath(c.out) + ".svg";
  const bool plots = c.task != Task::kChoices;
  for (const std::string& path : {json, svg}) {
    if (!std::filesystem::exists(path) || (path == svg && !plots) || IsEvaluation(json)) continue;
    return InvalidOption("out", "must be a new name or an evaluation's; got ", c.out, ", but ",
                         path, " is another file; give another name");
  }
  return absl::OkStatus();
}

absl::Status Check(const EvaluateConfig& c, const OptionTable& options) {
  if (c.data.empty()) return InvalidOption("data", "give a text, shards, or lines of JSON");
  if (c.task == Task::kChoices && (options.Given("field") || options.Given("data_cache"))) {
    return InvalidOption(options.Given("field") ? "field" : "data_cache",
                         "has no effect with --task=choices; leave it out");
  }
  for (const auto& [name, task] : kOfTask) {
    if (task != c.task && options.Given(name)) {
      return InvalidOption(name, "has no effect with --task=", NameOf(c.task, kTasks),
                           "; leave it out");
    }
  }
  return CheckOut(c);
}

// The texts of perplexity and haystacks, or the questions.
struct Input {
  TokenSpan text;
  std::vector<Question> questions;
  std::string identity;
};

absl::StatusOr<Input> ReadInput(const EvaluateConfig& c, const Tokenizer& tokenizer) {
  Input input;
  if (c.task == Task::kChoices) {
    absl::StatusOr<std::string> lines = ReadFile(ResolvePath(c.data));
    if (!lines.ok()) return InvalidOption("data", lines.status().message());
    absl::StatusOr<std::vector<Question>> questions = ParseQuestions(*lines);
    if (!questions.ok()) return InvalidOption("data", c.data, ": ", questions.status().message());
    input.questions = *std::move(questions);
    input.identity = *std::move(lines);
    return input;
  }
  BURST_ASSIGN_OR_RETURN(const std::vector<MixturePart> parts, ParseMixture(c.data));
  if (parts.size() > 1) {
    return InvalidOption("data", "must be texts without weights; got a mixture of ", parts.size(),
                         "; evaluate each part");
  }
  std::string data = ResolvePath(c.data);
  if (c.data == "kjv") {
    BURST_ASSIGN_OR_RETURN(data, FindRunfile("kjv/kjv.txt"));
  }
  const std::filesystem::path next_to_out = ResolvePath(c.out);
  const std::string cache = c.model.train.data_cache.empty()
                                ? (next_to_out.parent_path() / ".data-cache").string()
                                : ResolvePath(c.model.train.data_cache);
  BURST_ASSIGN_OR_RETURN(
      const TrainingData loaded,
      LoadTrainingData(data, data, std::nullopt, cache, &tokenizer, c.model.train.lines));
  input.text = loaded.train;
  input.identity = absl::StrCat(loaded.train.corpus->digest());
  return input;
}

// Completes the options by the model.
absl::Status Complete(const ModelSource& source, EvaluateConfig* c) {
  if (c->perplexity.seqlen == -1) c->perplexity.seqlen = source.seqlen;
  c->needle.seed = static_cast<uint64_t>(c->seed);
  if (c->needle.lengths.empty()) {
    for (int part = 8; part >= 1; part /= 2) {
      c->needle.lengths.push_back(std::max<int64_t>(1, source.seqlen / part));
    }
  }
  return CheckPerplexity(c->perplexity);
}

absl::StatusOr<Evaluation> Evaluate(const EvaluateConfig& c, Scorer* scorer, const Input& input,
                                    const Tokenizer& tokenizer, const PromptRules& rules) {
  switch (c.task) {
    case Task::kPerplexity:
      return EvaluatePerplexity(scorer, input.text, c.perplexity);
    case Task::kNeedle:
      return EvaluateNeedle(scorer, input.text, tokenizer, rules, c.needle);
    case Task::kChoices:
      break;
  }
  return EvaluateChoices(scorer, input.questions, tokenizer, rules);
}

absl::Status Write(const EvaluateConfig& c, const Evaluation& evaluation) {
  const std::string out = ResolvePath(c.out);
  BURST_RETURN_IF_ERROR(WriteFileAtomically(out + ".json", evaluation.json));
  if (!evaluation.svg.empty()) {
    BURST_RETURN_IF_ERROR(WriteFileAtomically(out + ".svg", evaluation.svg));
  }
  std::printf("%sThe evaluation is %s.json%s\n", evaluation.summary.c_str(), out.c_str(),
              evaluation.svg.empty() ? "" : " and .svg");
  return FlushOutput();
}

absl::Status Run(EvaluateConfig c, const Place& place, Communicator* processes) {
  BURST_ASSIGN_OR_RETURN(const ModelSource source, ModelSource::Find(c.model));
  BURST_RETURN_IF_ERROR(Complete(source, &c));
  BURST_ASSIGN_OR_RETURN(const Tokenizer tokenizer, source.FindTokenizer(c.model));
  BURST_ASSIGN_OR_RETURN(const PromptRules rules, source.FindRules(tokenizer, /*with_begin=*/true));
  absl::StatusOr<Input> input;
  {
    const ScopedThreadPool pool(place.ranks * place.threads);
    input = ReadInput(c, tokenizer);
  }
  BURST_RETURN_IF_ERROR(input.status());
  if (processes != nullptr) {
    BURST_RETURN_IF_ERROR(source.CheckAgreement(processes));
    BURST_RETURN_IF_ERROR(CheckAgreement(processes, {{"--tokenizer", tokenizer.ToJson()},
                                                     {"--data, its content", input->identity}}));
  }
  return OnRanks(place, processes, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto scorer, Scorer::Create(c.model, source, place, &comm));
    BURST_ASSIGN_OR_RETURN(const Evaluation evaluation,
                           Evaluate(c, scorer.get(), *input, tokenizer, rules));
    return comm.rank() == 0 ? Write(c, evaluation) : absl::OkStatus();
  });
}

int Main(int argc, char** argv) {
  EvaluateConfig config;
  OptionTable options = Options(&config);
  const std::string help = options.Help(
      "Evaluates a model: a checkpoint of //train or a Hugging Face directory.\n\n"
      "  bazel run //train:evaluate -- --checkpoint=DIR --data=book.txt --last=1024\n"
      "  bazel run //train:evaluate -- --checkpoint=DIR --data=book.txt --task=needle --ranks=4\n");
  if (PrintHelpOrVersion(argc, argv, help)) return ExitWithOutput();
  absl::Status usage = options.ParseArguments(argc, argv);
  if (usage.ok()) usage = Check(config, options);
  return RunOnPlace(config.model, options, usage, [&](const Place& place, Communicator* processes) {
    return Run(config, place, processes);
  });
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
