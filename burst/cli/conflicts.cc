#include "burst/cli/conflicts.h"

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace burst {
namespace {

std::vector<std::string> OptionsOf(const TraitText& trait) {
  return absl::StrSplit(trait.options, ' ');
}

// Returns the option of `trait` that the user gave, or else the first one.
std::string NameOf(const OptionTable& given, const TraitText& trait) {
  const std::vector<std::string> names = OptionsOf(trait);
  for (const std::string& name : names) {
    if (given.Given(name)) return name;
  }
  return names.front();
}

// Returns a phrase such as "with --tp=2", "without --exact" or "on the CPU".
std::string Phrase(const OptionTable& given, const TraitText& trait) {
  if (!absl::StartsWith(trait.text, "--")) return trait.text;
  const std::string name = NameOf(given, trait);
  if (!given.Given(name)) return absl::StrCat("with ", trait.text);
  const std::string value = given[name].get();
  const bool is_flag = given[name].type == Option::Type::kBool && value == "true";
  return absl::StrCat("with --", name, is_flag ? "" : "=", is_flag ? "" : value);
}

// Returns the values of an option with which a side holds: "2 or 3" of "--zero=2 or 3". An empty
// text means all values.
absl::string_view ValuesIn(absl::string_view text, absl::string_view name) {
  const std::string option = absl::StrCat("--", name);
  const size_t begin = text.find(option);
  if (begin == absl::string_view::npos) return text;
  text = text.substr(begin + option.size());
  text = text.substr(0, text.find(", --"));
  if (absl::StartsWith(text, "=") || absl::StartsWith(text, " ")) text.remove_prefix(1);
  return text;
}

// Returns "Not with --exact.", or "2 or 3: not with --exact." for a side that holds for some values
// alone.
std::string HelpSentence(const TraitText& own, const std::string& name, const TraitText& other) {
  const absl::string_view values = ValuesIn(own.text, name);
  return absl::StrCat(values.empty() ? "Not " : absl::StrCat(values, ": not "),
                      absl::StartsWith(other.text, "--") ? "with " : "", other.text, ".");
}

// Puts code spans around the options of a text: "`--zero=2` or 3".
std::string Marked(absl::string_view text) {
  std::string marked;
  for (absl::string_view word : absl::StrSplit(text, ' ')) {
    absl::string_view tail;
    if (absl::EndsWith(word, ",")) {
      tail = ",";
      word.remove_suffix(1);
    }
    const bool is_option = absl::StartsWith(word, "--");
    absl::StrAppend(&marked, marked.empty() ? "" : " ", is_option ? "`" : "", word,
                    is_option ? "`" : "", tail);
  }
  return marked;
}

}  // namespace

absl::Status ConflictError(const OptionTable& given, const TraitText& one, const TraitText& other,
                           absl::string_view why, absl::string_view advice) {
  const std::string name = NameOf(given, one);
  const std::string value =
      advice == kLeaveOut ? absl::StrCat(", or give --", name, "=", given[name].initial) : "";
  return InvalidOption(name, "must be ", one.must_be, " ", Phrase(given, other), ", because ", why,
                       "; got ", given[name].get(), "; ", advice, value);
}

void AddConflictToHelp(const TraitText& one, const TraitText& other, OptionTable* table) {
  const auto add = [&](const TraitText& own, const TraitText& its_other) {
    const std::vector<std::string> others = OptionsOf(its_other);
    if (std::none_of(others.begin(), others.end(),
                     [&](const std::string& name) { return table->Has(name); })) {
      return;
    }
    for (const std::string& name : OptionsOf(own)) {
      if (!table->Has(name)) continue;
      std::string& text = (*table)[name].conflicts;
      absl::StrAppend(&text, text.empty() ? "" : " ", HelpSentence(own, name, its_other));
    }
  };
  add(one, other);
  if (absl::StartsWith(other.text, "--")) add(other, one);  // others say what is needed
}

void ConflictTable::Add(const TraitText& one, const TraitText& other) {
  const std::string name =
      absl::StrCat(absl::StartsWith(other.text, "--") ? "with " : "", Marked(other.text));
  for (Row& row : rows_) {
    if (row.other != name) continue;
    absl::StrAppend(&row.refused, ", ", Marked(one.text));
    return;
  }
  rows_.push_back({name, Marked(one.text)});
}

std::string ConflictTable::Markdown() const {
  std::string table = "| case | refused |\n|---|---|\n";
  for (const Row& row : rows_) absl::StrAppend(&table, "| ", row.other, " | ", row.refused, " |\n");
  return table;
}

}  // namespace burst
