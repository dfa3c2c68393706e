#include "burst/cli/flags.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"

namespace burst {
namespace {

// The least number of insertions, deletions and substitutions that turn a into b.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

absl::CommandLineFlag* FindFlag(const std::vector<FlagGroup>& groups, absl::string_view name) {
  for (const FlagGroup& group : groups) {
    for (const char* flag : group.flags) {
      if (name == flag) return absl::FindCommandLineFlag(name);
    }
  }
  return nullptr;
}

absl::Status UnknownFlag(const std::vector<FlagGroup>& groups, absl::string_view name) {
  std::string message = absl::StrCat("there is no option --", name);
  const char* nearest = nullptr;
  size_t least = 3;  // further away is no typing error
  for (const FlagGroup& group : groups) {
    for (const char* flag : group.flags) {
      const size_t distance = EditDistance(name, flag);
      if (distance < least) least = distance, nearest = flag;
    }
  }
  if (nearest != nullptr) absl::StrAppend(&message, "; did you mean --", nearest, "?");
  return absl::InvalidArgumentError(absl::StrCat(message, " (--help lists all)"));
}

const char* Expected(const absl::CommandLineFlag& flag) {
  if (flag.IsOfType<int64_t>()) return "a whole number";
  if (flag.IsOfType<double>()) return "a number";
  if (flag.IsOfType<bool>()) return "true or false";
  return "another value";
}

// Lines of at most `width` characters.
std::vector<std::string> Wrap(absl::string_view text, size_t width) {
  std::vector<std::string> lines(1);
  for (absl::string_view word : absl::StrSplit(text, ' ')) {
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() > width) {
      lines.emplace_back();
    }
    absl::StrAppend(&lines.back(), lines.back().empty() ? "" : " ", word);
  }
  return lines;
}

}  // namespace

absl::Status SetFlag(const std::vector<FlagGroup>& groups, const std::string& name,
                     absl::string_view text) {
  absl::CommandLineFlag* flag = FindFlag(groups, name);
  if (flag == nullptr) return UnknownFlag(groups, name);
  std::string error;
  if (flag->ParseFrom(text, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, ": '", text, "' is not valid; expected ", Expected(*flag)));
}

absl::Status ParseArguments(const std::vector<FlagGroup>& groups, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "-")) {
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument '", argument, "'; options are given as --name=value"));
    }
    absl::ConsumePrefix(&argument, "-");
    const size_t equals = argument.find('=');
    const std::string name(argument.substr(0, equals));
    if (equals != absl::string_view::npos) {
      BURST_RETURN_IF_ERROR(SetFlag(groups, name, argument.substr(equals + 1)));
      continue;
    }
    const absl::CommandLineFlag* flag = FindFlag(groups, name);
    if (flag == nullptr && absl::StartsWith(name, "no")) {
      const std::string positive = name.substr(2);
      const absl::CommandLineFlag* negated = FindFlag(groups, positive);
      if (negated != nullptr && negated->IsOfType<bool>()) {
        BURST_RETURN_IF_ERROR(SetFlag(groups, positive, "false"));
        continue;
      }
    }
    if (flag == nullptr) return UnknownFlag(groups, name);
    if (flag->IsOfType<bool>()) {
      BURST_RETURN_IF_ERROR(SetFlag(groups, name, "true"));
    } else if (++i < argc) {
      BURST_RETURN_IF_ERROR(SetFlag(groups, name, argv[i]));
    } else {
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": a value is missing"));
    }
  }
  return absl::OkStatus();
}

absl::Status ParseConfigFile(const std::vector<FlagGroup>& groups, const std::string& path) {
  BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const auto json = nlohmann::ordered_json::parse(text, nullptr, false);
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not a JSON object of options and values"));
  }
  for (const auto& [name, value] : json.items()) {
    const std::string flag_text = value.is_string() ? value.get<std::string>() : value.dump();
    const absl::Status status = SetFlag(groups, name, flag_text);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

bool WantsHelp(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](absl::string_view argument) {
    return argument == "--help" || argument == "-help" || argument == "-h";
  });
}

std::string HelpText(absl::string_view introduction, const std::vector<FlagGroup>& groups) {
  constexpr size_t kColumn = 24, kWidth = 74;
  std::string text(introduction);
  for (const FlagGroup& group : groups) {
    absl::StrAppend(&text, "\n", group.title, "\n");
    for (const char* name : group.flags) {
      const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
      BURST_CHECK(flag != nullptr) << name;
      const std::string initial = flag->DefaultValue();
      const std::string left = absl::StrCat("  --", name, initial.empty() ? "" : "=", initial);
      std::vector<std::string> lines = Wrap(flag->Help(), kWidth);
      const bool fits = left.size() < kColumn;
      if (!fits) absl::StrAppend(&text, left, "\n");
      for (size_t i = 0; i < lines.size(); ++i) {
        absl::StrAppendFormat(&text, "%-*s%s\n", static_cast<int>(kColumn),
                              i == 0 && fits ? left : "", lines[i]);
      }
    }
  }
  return text;
}

}  // namespace burst
