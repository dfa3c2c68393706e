#include "burst/cli/options.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/strings/substitute.h"
#include "burst/base/check.h"
#include "burst/base/json.h"
#include "burst/base/version.h"
#include "burst/cli/files.h"
#include "burst/cli/text.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

template <typename T>
absl::Status Parsed(bool valid, absl::string_view text, const T& value, absl::string_view expected,
                    T* field) {
  if (!valid) {
    return absl::InvalidArgumentError(absl::StrCat("must be ", expected, "; got '", text, "'"));
  }
  *field = value;
  return absl::OkStatus();
}

Json ToJsonValue(const Option& option) {
  const std::string text = option.get();
  switch (option.type) {
    case Option::Type::kReal:
      return std::strtod(text.c_str(), nullptr);
    case Option::Type::kWhole:
      return Json::parse(text);
    case Option::Type::kBool:  // a switch may have a third value
      return text == "true" || text == "false" ? Json(text == "true") : Json(text);
    case Option::Type::kText:
      break;
  }
  // JSON inside a text reads better as an object.
  const absl::StatusOr<Json> json = ParseJson<Json>(text);
  return json.ok() && json->is_object() ? *json : Json(text);
}

}  // namespace

absl::Status ParseOption(absl::string_view text, std::string* value) {
  *value = std::string(text);
  return absl::OkStatus();
}

absl::Status ParseOption(absl::string_view text, int64_t* value) {
  int64_t number = 0;
  return Parsed(absl::SimpleAtoi(text, &number), text, number, "a whole number", value);
}

absl::StatusOr<int64_t> ParseCount(absl::string_view text) {
  int64_t number = 0;
  if (absl::SimpleAtoi(text, &number) && number >= 1) return number;
  return absl::InvalidArgumentError(
      absl::StrCat("must be a whole number of at least 1; got '", text, "'"));
}

absl::Status ParseOption(absl::string_view text, double* value) {
  double number = 0;
  const bool is_number = absl::SimpleAtod(text, &number) && std::isfinite(number);
  const bool is_hex = text.find_first_of("xX") != absl::string_view::npos;
  // A number that is rounded to 0 would mean what 0 means.
  const absl::string_view digits = text.substr(0, text.find_first_of("eE"));
  const bool underflows =
      number == 0 && digits.find_first_of("123456789") != absl::string_view::npos;
  return Parsed(is_number && !is_hex && !underflows, text, number, "a finite number", value);
}

absl::Status ParseOption(absl::string_view text, bool* value) {
  bool flag = false;
  return Parsed(absl::SimpleAtob(text, &flag), text, flag, "true or false", value);
}

std::string PrintOption(const std::string& value) { return value; }
std::string PrintOption(int64_t value) { return absl::StrCat(value); }
std::string PrintOption(bool value) { return value ? "true" : "false"; }
std::string PrintOption(double value) {
  const std::string text = absl::StrFormat("%.15g", value);
  return std::strtod(text.c_str(), nullptr) == value ? text : absl::StrFormat("%.17g", value);
}

std::string Option::Rule() const {
  const auto number = [](const std::optional<double>& value) { return PrintOption(*value); };
  std::string rule;
  if (bounds.min && bounds.max) {
    rule = absl::StrCat("from ", number(bounds.min), " to ", number(bounds.max));
  } else {
    std::vector<std::string> parts;
    if (bounds.min) parts.push_back(absl::StrCat("at least ", number(bounds.min)));
    if (bounds.above) parts.push_back(absl::StrCat("above ", number(bounds.above)));
    if (bounds.max) parts.push_back(absl::StrCat("at most ", number(bounds.max)));
    if (bounds.below) parts.push_back(absl::StrCat("below ", number(bounds.below)));
    rule = absl::StrJoin(parts, " and ");
  }
  if (bounds.special) rule = absl::StrCat(number(bounds.special), ", or ", rule);
  return rule;
}

absl::Status Option::CheckBounds() const {
  double value = 0;
  if (!absl::SimpleAtod(get(), &value) || value == bounds.special) return absl::OkStatus();
  const bool valid =
      (!bounds.min || value >= *bounds.min) && (!bounds.max || value <= *bounds.max) &&
      (!bounds.above || value > *bounds.above) && (!bounds.below || value < *bounds.below);
  if (valid) return absl::OkStatus();
  return InvalidOption(name, "must be ", Rule(), unit.empty() ? "" : absl::StrCat(" (", unit, ")"),
                       "; got ", get());
}

absl::Status CheckReplaceable(absl::string_view name, const std::string& path,
                              absl::string_view begin, absl::string_view kind) {
  if (!std::filesystem::exists(path)) return absl::OkStatus();
  const absl::StatusOr<std::string> old = ReadFile(path);
  if (!old.ok()) return InvalidOption(name, old.status().message());
  if (old->empty() || absl::StartsWithIgnoreCase(*old, begin)) return absl::OkStatus();
  return InvalidOption(name, "must be a new file or ", kind, "; got ", path,
                       ", which is another file; give another name");
}

absl::Status OptionTable::CheckBounds() const {
  for (const Option& option : options_) BURST_RETURN_IF_ERROR(option.CheckBounds());
  return absl::OkStatus();
}

Option& OptionTable::AddRow(absl::string_view name, Option::Type type,
                            std::function<absl::Status(absl::string_view)> set,
                            std::function<std::string()> get) {
  BURST_CHECK(Find(name) == nullptr) << "two options --" << name;
  Option row;
  row.name = std::string(name);
  row.group = group_;
  row.type = type;
  row.initial = get();
  row.set = std::move(set);
  row.get = std::move(get);
  options_.push_back(std::move(row));
  return options_.back();
}

Option& OptionTable::AddShared(const OptionTable& other, absl::string_view name,
                               absl::string_view remark) {
  Option option = other[name];
  option.group = group_;
  option.basic = false;
  option.conflicts.clear();
  if (!remark.empty()) absl::StrAppend(&option.help, " ", remark);
  options_.push_back(std::move(option));
  return options_.back();
}

void OptionTable::AddSharedGroup(const OptionTable& other, absl::string_view group,
                                 absl::string_view remark) {
  for (const Option& option : other.options_) {
    if (option.group == group && !Has(option.name)) AddShared(other, option.name, remark);
  }
}

const Option* OptionTable::Find(absl::string_view name) const {
  for (const Option& option : options_) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

const Option& OptionTable::operator[](absl::string_view name) const {
  const Option* option = Find(name);
  BURST_CHECK(option != nullptr) << "no option --" << name;
  return *option;
}

Option& OptionTable::operator[](absl::string_view name) {
  return const_cast<Option&>(std::as_const(*this)[name]);
}

bool OptionTable::Given(absl::string_view name) const {
  const Option& option = (*this)[name];
  return option.get() != option.initial;
}

std::vector<std::string> OptionTable::Changes(const OptionTable& before, const OptionTable& after) {
  std::vector<std::string> changes;
  for (size_t i = 0; i < after.options_.size(); ++i) {
    const std::string value = after.options_[i].get();
    if (value == before.options_[i].get()) continue;
    changes.push_back(absl::StrCat("--", after.options_[i].name, "=", value));
  }
  return changes;
}

std::string OptionTable::Sentences() const {
  std::string text;
  for (const Option& option : options_) {
    if (!option.sentence.empty() && Given(option.name)) {
      absl::StrAppend(&text, absl::Substitute(option.sentence, option.get()));
    }
  }
  return text;
}

absl::Status OptionTable::Unknown(absl::string_view name) const {
  if (const auto removed = removed_.find(std::string(name)); removed != removed_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("--", name, " was removed; ", removed->second));
  }
  if (const auto renamed = renamed_.find(std::string(name)); renamed != renamed_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", name, " was renamed; give --", renamed->second));
  }
  std::string message = absl::StrCat("there is no option --", name);
  const Option* nearest = nullptr;
  size_t least = 3;  // a larger distance is not a typing error
  for (const Option& option : options_) {
    const size_t distance = EditDistance(name, option.name);
    if (distance < least) least = distance, nearest = &option;
  }
  // Other programs' names, such as batch_size, often hold one of ours.
  for (const absl::string_view word : absl::StrSplit(name, '_')) {
    if (nearest == nullptr && Has(word)) nearest = &(*this)[word];
  }
  if (nearest != nullptr) absl::StrAppend(&message, "; did you mean --", nearest->name, "?");
  return absl::InvalidArgumentError(absl::StrCat(message, " (--help lists all)"));
}

absl::Status OptionTable::Set(absl::string_view name, absl::string_view text) {
  if (!Has(name)) return Unknown(name);
  Option& option = (*this)[name];
  option.named = true;
  option.reading = reading_;
  const absl::Status status = option.set(text);
  return status.ok() ? status : InvalidOption(name, status.message());
}

void OptionTable::EndReading() {
  for (const std::vector<std::string>& names : alternatives_) {
    const auto is_given = [&](const std::string& name) {
      return (*this)[name].reading == reading_;
    };
    if (std::none_of(names.begin(), names.end(),
                     [&](const std::string& name) { return is_given(name) && Given(name); })) {
      continue;
    }
    for (const std::string& name : names) {
      if (is_given(name)) continue;
      const Option& option = (*this)[name];
      BURST_CHECK(option.set(option.initial).ok());
    }
  }
  ++reading_;
}

absl::Status OptionTable::ParseArguments(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "-")) {
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument '", argument, "'; options are given as --name=value"));
    }
    absl::ConsumePrefix(&argument, "-");
    const size_t equals = argument.find('=');
    const absl::string_view name = argument.substr(0, equals);
    if (equals != absl::string_view::npos) {
      BURST_RETURN_IF_ERROR(Set(name, argument.substr(equals + 1)));
      continue;
    }
    const Option* option = Find(name);
    if (option == nullptr && absl::StartsWith(name, "no")) {
      const Option* negated = Find(name.substr(2));
      if (negated != nullptr && negated->type == Option::Type::kBool) {
        BURST_RETURN_IF_ERROR(Set(negated->name, "false"));
        continue;
      }
    }
    if (option == nullptr) return Unknown(name);
    if (option->type == Option::Type::kBool) {
      BURST_RETURN_IF_ERROR(Set(name, "true"));
    } else if (++i < argc) {
      BURST_RETURN_IF_ERROR(Set(name, argv[i]));
    } else {
      return InvalidOption(name, "a value is missing; give --", name, "=VALUE");
    }
  }
  EndReading();
  return CheckBounds();
}

absl::Status OptionTable::ParseJson(absl::string_view text, bool saved) {
  BURST_ASSIGN_OR_RETURN(const Json json, burst::ParseJson<Json>(text));
  if (!json.is_object()) {
    return absl::InvalidArgumentError("not a JSON object of options and values");
  }
  for (const auto& [name, value] : json.items()) {
    if (removed_.count(name) > 0) continue;
    const auto renamed = renamed_.find(name);
    const std::string& now = renamed == renamed_.end() ? name : renamed->second;
    const absl::Status set = Set(now, value.is_string() ? value.get<std::string>() : value.dump());
    const Option* option = Find(now);
    if (saved && option != nullptr && option->on_resume == OnResume::kMayChange) continue;
    BURST_RETURN_IF_ERROR(set);
  }
  EndReading();
  return absl::OkStatus();
}

absl::Status OptionTable::ParseFile(const std::string& path, bool saved) {
  BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxSettingsBytes));
  const absl::Status status = ParseJson(text, saved);
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", status.message()));
}

std::string OptionTable::ToJson() const {
  Json json = Json::object();
  for (const Option& option : options_) {
    if (option.on_resume != OnResume::kNotSaved) json[option.name] = ToJsonValue(option);
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::Status OptionTable::CheckResume(const OptionTable& before, const OptionTable& after) {
  for (size_t i = 0; i < after.options_.size(); ++i) {
    const Option &was = before.options_[i], &is = after.options_[i];
    if (is.on_resume != OnResume::kMustAgree || was.get() == is.get()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("--", is.name, ": ", is.get(), " differs from the run's ", was.get(),
                     "; a run is resumed with what it was started with"));
  }
  return absl::OkStatus();
}

namespace {

// Returns --help's text of an option: the help, its bounds and its conflicts.
std::string HelpText(const Option& option) {
  std::string text = option.help;
  const std::string rule = option.Rule();
  if (!rule.empty() || !option.unit.empty()) {
    const char* const comma = rule.empty() || option.unit.empty() ? "" : "; ";
    absl::StrAppend(&text, " [", option.unit, comma, rule, "]");
  }
  if (!option.conflicts.empty()) absl::StrAppend(&text, " ", option.conflicts);
  return text;
}

void AppendHelp(const Option& option, std::string* text) {
  constexpr size_t kColumn = 24, kWidth = 74;
  const std::string left =
      absl::StrCat("  --", option.name, option.initial.empty() ? "" : "=", option.initial);
  const bool fits = left.size() < kColumn;
  if (!fits) absl::StrAppend(text, left, "\n");
  const std::vector<std::string> lines = WrapLines(HelpText(option), kWidth);
  for (size_t i = 0; i < lines.size(); ++i) {
    absl::StrAppendFormat(text, "%-*s%s\n", static_cast<int>(kColumn), i == 0 && fits ? left : "",
                          lines[i]);
  }
}

}  // namespace

std::string OptionTable::Help(absl::string_view introduction) const {
  std::string text(introduction), group;
  const bool has_basic = std::any_of(options_.begin(), options_.end(),
                                     [](const Option& option) { return option.basic; });
  if (has_basic) absl::StrAppend(&text, "\nFirst\n");
  for (const Option& option : options_) {
    if (option.basic) AppendHelp(option, &text);
  }
  for (const Option& option : options_) {
    if (option.basic) continue;
    if (option.group != group) {
      group = option.group;
      absl::StrAppend(&text, "\n", has_basic ? "Advanced: " : "", group, "\n");
    }
    AppendHelp(option, &text);
  }
  absl::StrAppend(&text, "\n--help prints this, --version the version.\n");
  return text;
}

bool PrintHelpOrVersion(int argc, char** argv, const std::string& help) {
  const auto asks = [&](std::initializer_list<absl::string_view> names) {
    return std::find_first_of(argv + 1, argv + argc, names.begin(), names.end(),
                              [](absl::string_view a, absl::string_view b) { return a == b; }) !=
           argv + argc;
  };
  if (asks({"--help", "-help", "-h"})) {
    std::fputs(help.c_str(), stdout);
  } else if (asks({"--version", "-version"})) {
    std::printf("Burst %s\n", kVersion);
  } else {
    return false;
  }
  return true;
}

}  // namespace burst
