// bazel run //train:generate: generates text from a checkpoint or a Hugging Face directory.
#include "train/generate/generate.h"

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "burst/base/enum_names.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "burst/cli/text.h"
#include "burst/comm/agreement.h"
#include "burst/comm/communicator.h"
#include "model/transformer.h"
#include "train/data/tokenizer.h"
#include "train/generate/loaded_model.h"
#include "train/generate/prompt_lines.h"

namespace burst {
namespace {

// Whether the token that the tokenizer puts before a text (BOS) comes before the prompt.
enum class Bos { kNo, kYes, kAuto };
constexpr EnumName<Bos> kBos[] = {{Bos::kNo, "false"}, {Bos::kYes, "true"}, {Bos::kAuto, "auto"}};

struct GenerateConfig {
  ModelOptions model;
  std::string prompt, prompt_file, prompts, stop;
  bool stream = false;
  Bos bos = Bos::kAuto;
  int64_t tokens = 500;
  double temperature = 0.8;
  int64_t top_k = 0;
  double top_p = 1, min_p = 0, repetition_penalty = 1;
  int64_t seed = 1;
};

void AddPromptOptions(GenerateConfig* c, OptionTable* t) {
  t->Add("prompt", &c->prompt)
      .Help("Begin the text with this. Empty: with BOS or the end-of-text token, if there is one.");
  t->Add("prompt_file", &c->prompt_file)
      .Help("Read the prompt from a file; -: from standard input.");
  t->Add("prompts", &c->prompts)
      .Help(
          "Read a prompt from each line of a file: a JSON text, or an object with a prompt. Write "
          "a line with prompt and text for each. -: standard input, line by line.");
  t->Add("stream", &c->stream)
      .Help("Write each piece of a text as a line of its own, too, with --prompts.");
  t->AddSwitch("bos", &c->bos, kBos)
      .Help(
          "Put tokens such as <s> before the prompt, as the tokenizer does. auto: as transformers "
          "does, or as the documents of a run begin.");
}

void AddSamplingOptions(GenerateConfig* c, OptionTable* t) {
  t->Add("tokens", &c->tokens).Min(0).Help("Generate N tokens.");
  t->Add("stop", &c->stop).Help("End the text before the first place that has this.");
  t->Add("temperature", &c->temperature)
      .Min(0)
      .Help("Choose likelier tokens below 1, less likely ones above. 0: the likeliest.");
  t->Add("top_k", &c->top_k).Min(0).Help("Choose among the N likeliest tokens. 0: among all.");
  t->Add("top_p", &c->top_p)
      .Above(0)
      .Max(1)
      .Help("Choose among the likeliest tokens whose probabilities sum to P. 1: among all.");
  t->Add("min_p", &c->min_p)
      .Min(0)
      .Max(1)
      .Help("Choose among tokens with at least P of the likeliest one's probability. 0: all.");
  t->Add("repetition_penalty", &c->repetition_penalty)
      .Above(0)
      .Max(1e6)
      .Help("Make tokens of the text less likely above 1, likelier below. 1: neither.");
  t->Add("seed", &c->seed)
      .Min(0)
      .Help("Choose another text with another seed. A line of --prompts adds the lines before it.");
}

OptionTable Options(GenerateConfig* c) {
  OptionTable t;
  t.Group("Options");
  AddSourceOptions(&c->model, &t);
  AddPromptOptions(c, &t);
  AddSamplingOptions(c, &t);
  AddRankOptions(&c->model, &t);
  return t;
}

absl::Status Check(const GenerateConfig& c) {
  const std::pair<const char*, const std::string*> sources[] = {
      {"prompt", &c.prompt}, {"prompt_file", &c.prompt_file}, {"prompts", &c.prompts}};
  const char* given = nullptr;
  for (const auto& [name, value] : sources) {
    if (value->empty()) continue;
    if (given != nullptr) {
      return InvalidOption(name, "must be empty with --", given, "; got ", *value,
                           "; give one of the two");
    }
    given = name;
  }
  if (c.stream && c.prompts.empty()) {
    return InvalidOption("stream", "must be given with --prompts; a single text always streams");
  }
  return absl::OkStatus();
}

absl::StatusOr<PromptRules> FindRules(const GenerateConfig& c, const ModelSource& source,
                                      const Tokenizer& tokenizer) {
  absl::StatusOr<PromptRules> rules = source.FindRules(tokenizer, c.bos == Bos::kAuto);
  if (!rules.ok() || c.bos != Bos::kYes) return rules;
  absl::StatusOr<std::vector<int32_t>> begin = tokenizer.Beginning();
  if (!begin.ok()) return InvalidOption("bos", begin.status().message());
  if (begin->empty()) return InvalidOption("bos", "the tokenizer puts nothing before a text");
  rules->begin = *std::move(begin);
  return rules;
}

// Returns the prompt of --prompt or --prompt_file.
absl::StatusOr<std::string> ReadPrompt(const GenerateConfig& c) {
  if (c.prompt_file.empty()) return c.prompt;
  if (c.prompt_file != "-") {
    absl::StatusOr<std::string> text = ReadFile(ResolvePath(c.prompt_file));
    if (!text.ok()) return InvalidOption("prompt_file", text.status().message());
    return text;
  }
  std::string text, block(1 << 16, '\0');
  while (const size_t bytes = std::fread(block.data(), 1, block.size(), stdin)) {
    text.append(block, 0, bytes);
  }
  if (std::ferror(stdin) != 0) return InvalidOption("prompt_file", "cannot read standard input");
  return text;
}

// Returns the prompt's tokens. The model must have all of them.
absl::StatusOr<std::vector<int32_t>> TokensOfPrompt(const std::string& prompt,
                                                    const ModelSource& source,
                                                    const Tokenizer& tokenizer,
                                                    const PromptRules& rules) {
  const absl::StatusOr<std::vector<int32_t>> tokens = EncodePrompt(tokenizer, prompt, rules);
  if (!tokens.ok()) return InvalidOption("prompt", tokens.status().message());
  for (const int32_t token : *tokens) {
    if (token < source.model.vocab) continue;
    return InvalidOption("prompt", "must be tokens of the model, which has ", source.model.vocab,
                         "; got the token ", token, " ('",
                         absl::Utf8SafeCEscape(tokenizer.Decode({token})), "') of the ",
                         tokenizer.vocab(),
                         " of the tokenizer; give the model's own tokenizer (--tokenizer), or "
                         "another prompt");
  }
  return tokens;
}

// Prints warnings about the model before the texts.
void WarnOfModel(const ModelSource& source, const Tokenizer& tokenizer) {
  const std::string unread = UnreadWeights(source.pretrained);
  if (!unread.empty()) absl::FPrintF(stderr, "warning: --checkpoint: %s\n", unread);
  if (tokenizer.vocab() > source.model.vocab) {
    absl::FPrintF(stderr,
                  "warning: the tokenizer has %s tokens and the model %s: the others are never "
                  "generated\n",
                  Thousands(tokenizer.vocab()), Thousands(source.model.vocab));
  }
}

void WarnOfLength(const ModelSource& source, int64_t prompt_tokens) {
  const int64_t read = ReadTokens(prompt_tokens, source.context);
  if (read == prompt_tokens) return;
  absl::FPrintF(stderr,
                "warning: the prompt has %s tokens and the model's context %s: the last %s of "
                "them are read\n",
                Thousands(prompt_tokens), Thousands(source.context), Thousands(read));
}

// Makes texts from a model: one, or one for each line of --prompts. `comm`: the ranks that share
// it, or null. Rank 0 reads the lines and writes the texts.
class Generation {
 public:
  Generation(const GenerateConfig& config, const ModelSource& source, const Tokenizer& tokenizer,
             const PromptRules& rules, Communicator* comm)
      : config_(config), source_(source), tokenizer_(tokenizer), rules_(rules), comm_(comm) {}

  absl::Status Load(const Place& place) {
    BURST_ASSIGN_OR_RETURN(model_, source_.Load(place));
    if (comm_ == nullptr) return absl::OkStatus();
    BURST_ASSIGN_OR_RETURN(attention_, AttentionOver(config_.model, source_, comm_));
    ranks_ = GenerationRanks{comm_, attention_.get(), Mask::SlidingWindow(source_.window)};
    return absl::OkStatus();
  }

  // Writes the prompt and the text after it.
  absl::Status Text(const std::string& prompt, const std::vector<int32_t>& tokens) const {
    absl::Status output;
    const auto print = [&](absl::string_view text) {
      if (!output.ok()) return false;
      std::fwrite(text.data(), 1, text.size(), stdout);
      output = FlushOutput();
      return output.ok() && std::ferror(stdout) == 0;
    };
    if (reads()) {
      WarnOfLength(source_, static_cast<int64_t>(tokens.size()));
      print(prompt);
    }
    BURST_RETURN_IF_ERROR(Generate(tokens, /*line=*/0, print));
    if (reads()) print("\n");
    return output;
  }

  // Writes a line for each line of the prompts.
  absl::Status Lines() const {
    PromptLines lines(config_.prompts, config_.stream);
    if (reads()) BURST_RETURN_IF_ERROR(lines.Open());
    for (int64_t line = 0;; ++line) {
      absl::Status error;
      std::vector<int32_t> tokens;  // empty: the end
      if (reads()) {
        absl::StatusOr<std::vector<int32_t>> next = NextPrompt(&lines);
        if (next.ok())
          tokens = *std::move(next);
        else
          error = next.status();
      }
      BURST_RETURN_IF_ERROR(Share(&tokens));
      if (tokens.empty()) return error;
      BURST_RETURN_IF_ERROR(
          Generate(tokens, line, [&](absl::string_view piece) { return lines.WritePiece(piece); }));
      if (reads()) BURST_RETURN_IF_ERROR(lines.WriteText());
    }
  }

 private:
  bool reads() const { return comm_ == nullptr || comm_->rank() == 0; }

  absl::StatusOr<std::vector<int32_t>> NextPrompt(PromptLines* lines) const {
    BURST_ASSIGN_OR_RETURN(const std::optional<std::string> prompt, lines->Next());
    if (!prompt.has_value()) return std::vector<int32_t>();
    absl::StatusOr<std::vector<int32_t>> tokens =
        TokensOfPrompt(*prompt, source_, tokenizer_, rules_);
    if (!tokens.ok()) return lines->Error(tokens.status().message());
    WarnOfLength(source_, static_cast<int64_t>(tokens->size()));
    return tokens;
  }

  // Gives rank 0's tokens to all ranks.
  absl::Status Share(std::vector<int32_t>* tokens) const {
    if (comm_ == nullptr) return absl::OkStatus();
    auto count = static_cast<int64_t>(tokens->size());
    BURST_RETURN_IF_ERROR(comm_->Broadcast(&count, sizeof(count), /*root=*/0));
    tokens->resize(count);
    if (count == 0) return absl::OkStatus();
    return comm_->Broadcast(tokens->data(), count * static_cast<int64_t>(sizeof(int32_t)), 0);
  }

  // Gives the text after `prompt` to `emit`, up to --stop. Equal prompts in other lines of
  // --prompts have other texts.
  absl::Status Generate(const std::vector<int32_t>& prompt, int64_t line,
                        const std::function<bool(absl::string_view)>& emit) const {
    GenerationOptions options;
    options.sampling = {config_.temperature,
                        config_.top_k,
                        static_cast<uint64_t>(config_.seed) + static_cast<uint64_t>(line),
                        config_.top_p,
                        config_.min_p,
                        config_.repetition_penalty};
    options.tokens = config_.tokens;
    options.ends = rules_.ends;
    options.context = source_.context;
    options.window = source_.window;
    TextBefore text(config_.stop);
    const auto append = [&](absl::string_view piece) {
      const std::string shown = text.Append(piece);
      return (shown.empty() || emit(shown)) && !text.ended();
    };
    BURST_RETURN_IF_ERROR(burst::Generate(*model_, tokenizer_, prompt, options, append, ranks_));
    const std::string rest = text.Rest();
    if (!rest.empty()) emit(rest);
    return absl::OkStatus();
  }

  const GenerateConfig& config_;
  const ModelSource& source_;
  const Tokenizer& tokenizer_;
  const PromptRules& rules_;
  Communicator* const comm_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<SequenceParallelAttention> attention_;
  std::optional<GenerationRanks> ranks_;
};

// Generates. `processes` is this process's communicator if the ranks are processes, else null.
absl::Status Run(const GenerateConfig& c, const Place& place, Communicator* processes) {
  BURST_ASSIGN_OR_RETURN(const ModelSource source, ModelSource::Find(c.model));
  BURST_ASSIGN_OR_RETURN(const Tokenizer tokenizer, source.FindTokenizer(c.model));
  BURST_ASSIGN_OR_RETURN(const PromptRules rules, FindRules(c, source, tokenizer));
  for (const auto& [name, file] :
       {std::pair{"prompt_file", c.prompt_file}, {"prompts", c.prompts}}) {
    if (file != "-" || processes == nullptr) continue;
    return InvalidOption(name, "- is read by one process; give a file that all ranks see");
  }
  std::string prompt;
  std::vector<int32_t> tokens;
  if (c.prompts.empty()) {
    BURST_ASSIGN_OR_RETURN(prompt, ReadPrompt(c));
    BURST_ASSIGN_OR_RETURN(tokens, TokensOfPrompt(prompt, source, tokenizer, rules));
  }
  if (processes != nullptr) {
    BURST_RETURN_IF_ERROR(source.CheckAgreement(processes));
    BURST_RETURN_IF_ERROR(
        CheckAgreement(processes, {{"--tokenizer", tokenizer.ToJson()},
                                   {"--prompt, its tokens", absl::StrJoin(tokens, " ")}}));
  }
  if (processes == nullptr || processes->rank() == 0) WarnOfModel(source, tokenizer);
  return OnRanks(place, processes, [&](Communicator& comm) -> absl::Status {
    Generation generation(c, source, tokenizer, rules, comm.world_size() > 1 ? &comm : nullptr);
    BURST_RETURN_IF_ERROR(generation.Load(place));
    return c.prompts.empty() ? generation.Text(prompt, tokens) : generation.Lines();
  });
}

int Main(int argc, char** argv) {
  GenerateConfig config;
  OptionTable options = Options(&config);
  const std::string help = options.Help(
      "Generates text from a checkpoint of //train or a Hugging Face directory.\n\n"
      "  bazel run //train:generate -- --checkpoint=runs/NAME --prompt='And'\n");
  if (PrintHelpOrVersion(argc, argv, help)) return ExitWithOutput();
  absl::Status usage = options.ParseArguments(argc, argv);
  if (usage.ok()) usage = Check(config);
  return RunOnPlace(config.model, options, usage, [&](const Place& place, Communicator* processes) {
    return Run(config, place, processes);
  });
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
