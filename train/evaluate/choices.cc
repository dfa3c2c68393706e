#include "train/evaluate/choices.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "burst/cli/options.h"
#include "burst/cli/text.h"
#include "train/data/utf8.h"

namespace burst {
namespace {

using Json = nlohmann::json;

absl::StatusOr<Question> ParseQuestion(absl::string_view text) {
  BURST_ASSIGN_OR_RETURN(const Json line, ParseJson(text));
  const auto malformed = [] {
    return absl::InvalidArgumentError(
        "must be {\"context\": TEXT, \"choices\": [TEXT, ...], \"answer\": INDEX} or {\"text\": "
        "TEXT}");
  };
  if (!line.is_object()) return malformed();
  Question question;
  if (const Json text = line.value("text", Json()); text.is_string()) {
    const auto whole = std::string(absl::StripAsciiWhitespace(text.get<std::string>()));
    const size_t space = whole.find_last_of(" \n\t");
    if (space == std::string::npos) return absl::InvalidArgumentError("must have two words");
    question.context = whole.substr(0, space);
    question.choices = {whole.substr(space)};
    return question;
  }
  const Json context = line.value("context", Json()), choices = line.value("choices", Json()),
             answer = line.value("answer", Json());
  const bool texts = choices.is_array() && choices.size() >= 2 &&
                     std::all_of(choices.begin(), choices.end(),
                                 [](const Json& choice) { return choice.is_string(); });
  if (!context.is_string() || !texts || !answer.is_number_integer()) return malformed();
  question.context = context.get<std::string>();
  question.choices = choices.get<std::vector<std::string>>();
  if (!answer.is_number_unsigned() || answer.get<uint64_t>() >= choices.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("answer must be from 0 to ", choices.size() - 1, "; got ", answer.dump()));
  }
  question.answer = answer.get<int64_t>();
  return question;
}

// The score of a choice: its loss, and whether greedy generation gives it.
struct ChoiceScore {
  double loss = 0;
  bool greedy = true;
};

absl::StatusOr<ChoiceScore> ScoreChoice(Scorer* scorer, const Question& question,
                                        const std::string& choice, const Tokenizer& tokenizer,
                                        const PromptRules& rules) {
  // Spaces that end the context belong to the choice, because tokens begin with them.
  const size_t end = question.context.find_last_not_of(' ') + 1;
  const std::string context = question.context.substr(0, end);
  BURST_ASSIGN_OR_RETURN(const std::vector<int32_t> before,
                         EncodePrompt(tokenizer, context, rules));
  BURST_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                         EncodePrompt(tokenizer, absl::StrCat(question.context, choice), rules));
  // The text before an empty context is BOS or the end of text.
  if (context.empty() && rules.begin.empty()) {
    tokens.insert(tokens.begin(), before.begin(), before.end());
  }
  if (tokens.size() <= before.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the choice '", choice, "' must have a token of its own"));
  }
  const auto from = static_cast<int64_t>(before.size());
  BURST_ASSIGN_OR_RETURN(const auto scores, scorer->Score(BatchOf({tokens}, from)));
  ChoiceScore score;
  for (size_t t = from - 1; t < scores.size(); ++t) {
    score.loss += scores[t].loss;
    score.greedy &= scores[t].likeliest;
  }
  return score;
}

int64_t Characters(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return !ContinuesCharacter(c); });
}

int64_t Least(const std::vector<double>& values) {
  return std::min_element(values.begin(), values.end()) - values.begin();
}

}  // namespace

absl::StatusOr<std::vector<Question>> ParseQuestions(absl::string_view lines) {
  std::vector<Question> questions;
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(lines, '\n')) {
    ++number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    absl::StatusOr<Question> question = ParseQuestion(line);
    if (question.ok() && !questions.empty() &&
        (questions[0].choices.size() == 1) != (question->choices.size() == 1)) {
      question =
          absl::InvalidArgumentError("must have choices as the lines before, or none as they");
    }
    if (!question.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": ", question.status().message()));
    }
    questions.push_back(*std::move(question));
  }
  if (questions.empty()) return absl::InvalidArgumentError("must have a line with a question");
  return questions;
}

absl::StatusOr<Evaluation> EvaluateChoices(Scorer* scorer, const std::vector<Question>& questions,
                                           const Tokenizer& tokenizer, const PromptRules& rules) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  const bool words = questions[0].choices.size() == 1;
  int64_t right = 0, right_by_length = 0;
  double word_loss = 0;
  for (size_t i = 0; i < questions.size(); ++i) {
    const Question& question = questions[i];
    std::vector<double> losses, by_length;
    for (const std::string& choice : question.choices) {
      const absl::StatusOr<ChoiceScore> score =
          ScoreChoice(scorer, question, choice, tokenizer, rules);
      if (!score.ok()) {
        return absl::Status(score.status().code(), absl::StrCat("--data: question ", i + 1, ": ",
                                                                score.status().message()));
      }
      losses.push_back(score->loss);
      by_length.push_back(score->loss /
                          static_cast<double>(std::max<int64_t>(1, Characters(choice))));
      if (words) right += score->greedy ? 1 : 0;
    }
    word_loss += losses[0];
    if (!words) {
      right += Least(losses) == question.answer ? 1 : 0;
      right_by_length += Least(by_length) == question.answer ? 1 : 0;
    }
    rows.push_back({{"losses", losses}});
  }
  const auto count = static_cast<double>(questions.size());
  nlohmann::ordered_json json = {{"questions", questions.size()},
                                 {"accuracy", static_cast<double>(right) / count}};
  Evaluation evaluation;
  evaluation.summary = absl::StrFormat("%s questions: accuracy %.4f", Thousands(questions.size()),
                                       static_cast<double>(right) / count);
  if (words) {
    json["perplexity"] = std::exp(word_loss / count);
    absl::StrAppendFormat(&evaluation.summary, ", perplexity of the last word %.4f",
                          std::exp(word_loss / count));
  } else {
    json["accuracy_by_length"] = static_cast<double>(right_by_length) / count;
    absl::StrAppendFormat(&evaluation.summary, ", by length %.4f",
                          static_cast<double>(right_by_length) / count);
  }
  evaluation.summary += "\n";
  json["by_question"] = std::move(rows);
  evaluation.json = json.dump(1) + "\n";
  return evaluation;
}

}  // namespace burst
