#include "train/evaluate/needle.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/cli/heat_map.h"
#include "burst/cli/options.h"
#include "burst/cli/text.h"

namespace burst {
namespace {

constexpr const char* kCities[] = {"London", "Paris", "Tokyo",  "Cairo",  "Lima", "Oslo",
                                   "Rome",   "Delhi", "Vienna", "Boston", "Kyiv", "Nairobi"};
constexpr uint64_t kNeedleStream = uint64_t{0x4EED1E} << 32;
constexpr int64_t kSentence = 256;  // tokens before a depth among which a sentence may end

// The tokens that a haystack has in addition to its text.
struct Needle {
  std::vector<int32_t> needle, question;  // the question with its answer
  int64_t answer = 0;                     // the answer's place in the question
};

absl::StatusOr<std::vector<int32_t>> Tokens(const Tokenizer& tokenizer, absl::string_view text) {
  std::vector<int32_t> tokens;
  const absl::Status status = tokenizer.Encode(text, &tokens);
  if (status.ok()) return tokens;
  return InvalidOption("task", "the model's tokenizer must write the needle '", text, "'; got ",
                       status.message(), "; give a model of another tokenizer");
}

absl::StatusOr<Needle> MakeNeedle(const Tokenizer& tokenizer, uint64_t city, uint64_t bits) {
  const std::string number = absl::StrCat(1'000'000 + bits % 9'000'000);
  const std::string fact =
      absl::StrCat("The special number of ", kCities[city % std::size(kCities)], " is");
  Needle made;
  BURST_ASSIGN_OR_RETURN(made.needle,
                         Tokens(tokenizer, absl::StrCat(" ", fact, " ", number, ".\n")));
  const std::string question = absl::StrCat("\n", fact);
  BURST_ASSIGN_OR_RETURN(made.question, Tokens(tokenizer, absl::StrCat(question, " ", number)));
  BURST_ASSIGN_OR_RETURN(const std::vector<int32_t> asked, Tokens(tokenizer, question));
  made.answer =
      std::mismatch(asked.begin(), asked.end(), made.question.begin(), made.question.end()).first -
      asked.begin();
  return made;
}

bool EndsSentence(const Tokenizer& tokenizer, int32_t token) {
  const std::string text = tokenizer.Decode({token});
  return !text.empty() && std::string(".!?\n").find(text.back()) != std::string::npos;
}

}  // namespace

absl::StatusOr<Haystack> MakeHaystack(const TokenSpan& text, const Tokenizer& tokenizer,
                                      const PromptRules& rules, int64_t length, int64_t depth,
                                      uint64_t seed, uint64_t trial) {
  const auto random = Philox(seed, kNeedleStream, trial);
  BURST_ASSIGN_OR_RETURN(const Needle made, MakeNeedle(tokenizer, random[0], random[1]));
  const auto others =
      static_cast<int64_t>(rules.begin.size() + made.needle.size() + made.question.size());
  const int64_t around = length - others;
  if (around < 1) {
    return InvalidOption("lengths", "must be at least ", others + 1,
                         ", so that the needle fits; got ", length);
  }
  if (around > text.size()) {
    return InvalidOption("data", "must have at least ", around, " tokens for --lengths=", length,
                         "; got ", text.size());
  }
  std::vector<int32_t> hay(around);
  const auto begin =
      static_cast<int64_t>(random[2] % static_cast<uint64_t>(text.size() - around + 1));
  BURST_RETURN_IF_ERROR(text.corpus->Read(text.begin + begin, around, hay.data()));
  int64_t place = around * depth / 100;
  for (int64_t back = 0; back < std::min(place, kSentence); ++back) {
    if (!EndsSentence(tokenizer, hay[place - back - 1])) continue;
    place -= back;
    break;
  }
  Haystack haystack;
  const auto append = [&](auto first, auto last) {
    haystack.tokens.insert(haystack.tokens.end(), first, last);
  };
  append(rules.begin.begin(), rules.begin.end());
  append(hay.begin(), hay.begin() + place);
  append(made.needle.begin(), made.needle.end());
  append(hay.begin() + place, hay.end());
  haystack.answer = static_cast<int64_t>(haystack.tokens.size()) + made.answer;
  append(made.question.begin(), made.question.end());
  return haystack;
}

absl::StatusOr<Evaluation> EvaluateNeedle(Scorer* scorer, const TokenSpan& text,
                                          const Tokenizer& tokenizer, const PromptRules& rules,
                                          const NeedleOptions& options) {
  HeatMap map;
  map.title = "Needles found";
  map.x_label = "tokens";
  map.y_label = "depth";
  for (const int64_t length : options.lengths) map.columns.push_back(Thousands(length));
  std::vector<std::vector<double>> losses;
  Evaluation evaluation;
  uint64_t trial = 0;  // a haystack of its own for every trial
  for (const int64_t depth : options.depths) {
    map.rows.push_back(absl::StrCat(depth, " %"));
    map.shares.emplace_back();
    losses.emplace_back();
    for (const int64_t length : options.lengths) {
      int64_t found = 0, tokens = 0;
      double loss = 0;
      for (int64_t i = 0; i < options.trials; ++i, ++trial) {
        BURST_ASSIGN_OR_RETURN(const Haystack haystack, MakeHaystack(text, tokenizer, rules, length,
                                                                     depth, options.seed, trial));
        BURST_ASSIGN_OR_RETURN(const auto scores,
                               scorer->Score(BatchOf({haystack.tokens}, haystack.answer)));
        bool all = true;
        for (int64_t t = haystack.answer; t < length; ++t) {
          loss += scores[t - 1].loss;
          all &= scores[t - 1].likeliest;
        }
        tokens += length - haystack.answer;
        found += all ? 1 : 0;
      }
      map.shares.back().push_back(static_cast<double>(found) / static_cast<double>(options.trials));
      losses.back().push_back(loss / static_cast<double>(tokens));
      absl::StrAppendFormat(&evaluation.summary,
                            "  %9s tokens, depth %3d %%  found %d of %d  loss %.4f\n",
                            Thousands(length), depth, found, options.trials, losses.back().back());
    }
  }
  const nlohmann::ordered_json json = {{"lengths", options.lengths}, {"depths", options.depths},
                                       {"trials", options.trials},   {"seed", options.seed},
                                       {"found", map.shares},        {"loss", losses}};
  evaluation.json = json.dump(1) + "\n";
  evaluation.svg = HeatMapSvg(map);
  return evaluation;
}

}  // namespace burst
