// The options of a program: one table with a row for each option. The command line, files of
// options (JSON), --help and the check of a resumed run all derive from the table.
//
//   struct Config { int64_t steps = 1000; bool packed = false; };
//
//   OptionTable Options(Config* config) {
//     OptionTable table;
//     table.Group("Training");
//     table.Add("steps", &config->steps).Min(1).MayChange().Help("Run N optimizer steps.");
//     table.Add("packed", &config->packed).Help("End attention at documents.");
//     table.Add("out", &config->out).NotSaved().Of(Scope::kHost).Help("Write into this folder.");
//     return table;
//   }
//
// A field's value at the time of Add is the option's default. What two options must not do together
// is in a table of conflicts (conflicts.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "burst/base/enum_names.h"
#include "burst/base/status.h"

namespace burst {

// InvalidArgument: "--name: what".
template <typename... Args>
absl::Status InvalidOption(absl::string_view name, const Args&... what) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, ": ", what...));
}
// Refuses a path of an option whose file the program must not replace: one that is neither empty
// nor begins with `begin`, in any case. `kind`: what such a file is, "an HTML page".
absl::Status CheckReplaceable(absl::string_view name, const std::string& path,
                              absl::string_view begin, absl::string_view kind);

// What a resumed run may do with an option.
enum class OnResume {
  kMustAgree,  // the run was started with one value and keeps it
  kMayChange,
  kNotSaved,  // belongs to one start of the program: a file of options is written without it
};

// Which processes of a job must give an option the same value.
enum class Scope {
  kJob,      // all processes, because another value on one rank would change the run
  kHost,     // the processes of one host; a path may differ between hosts
  kProcess,  // none, because results do not depend on it
};

// From the text of an option to the value of its field. The message does not name the option.
absl::Status ParseOption(absl::string_view text, std::string* value);
absl::Status ParseOption(absl::string_view text, int64_t* value);
absl::Status ParseOption(absl::string_view text, double* value);  // finite
absl::Status ParseOption(absl::string_view text, bool* value);

// An element of a list.
absl::StatusOr<int64_t> ParseCount(absl::string_view text);  // a whole number of at least 1

// And back.
std::string PrintOption(const std::string& value);
std::string PrintOption(int64_t value);
std::string PrintOption(double value);
std::string PrintOption(bool value);

// A row of the table. Its functions set a property each and return the row.
struct Option {
  enum class Type { kText, kWhole, kReal, kBool };  // in JSON

  Option& Help(absl::string_view text) { return help = std::string(text), *this; }
  Option& Min(double least) { return bounds.min = least, *this; }  // the least valid value
  Option& Max(double most) { return bounds.max = most, *this; }    // the largest valid value
  Option& Above(double limit) { return bounds.above = limit, *this; }
  Option& Below(double limit) { return bounds.below = limit, *this; }
  // A value outside of the bounds that has a meaning of its own, such as -1 for "automatic".
  Option& Or(double value) { return bounds.special = value, *this; }
  Option& Unit(absl::string_view text) { return unit = std::string(text), *this; }
  Option& MayChange() { return on_resume = OnResume::kMayChange, *this; }
  Option& NotSaved() { return on_resume = OnResume::kNotSaved, *this; }
  Option& Of(Scope value) { return scope = value, *this; }
  // The sentence for the header of a run whose value is not the default: $0 stands for the value.
  Option& Says(absl::string_view text) { return sentence = std::string(text), *this; }
  Option& Basic() { return basic = true, *this; }  // --help lists it before the others

  // "must be ...", without the "must be"; empty: any value is valid.
  std::string Rule() const;
  // InvalidArgument "--name: must be RULE; got VALUE" if the field is out of bounds.
  absl::Status CheckBounds() const;

  struct Bounds {
    std::optional<double> min, max, above, below, special;
  };
  std::string name, group;
  Type type = Type::kText;
  std::string initial;  // the default, as text
  // The field, as text.
  std::function<absl::Status(absl::string_view text)> set;
  std::function<std::string()> get;
  std::string help, unit, sentence;
  std::string conflicts;  // for --help: "Not with: --exact."
  Bounds bounds;
  OnResume on_resume = OnResume::kMustAgree;
  Scope scope = Scope::kJob;
  bool basic = false;
  bool named = false;  // the command line or a file gave a value
  int reading = 0;     // the number of the reading that gave it last
};

// Refers to the fields, which must outlive it.
class OptionTable {
 public:
  // Names an option of an earlier version on which results did not depend. A file may still give
  // it, without effect. On the command line it is an error that ends with `advice`.
  void Removed(absl::string_view name, absl::string_view advice) {
    removed_[std::string(name)] = std::string(advice);
  }

  // Names an option of an earlier version whose meaning `name` has now. A file may still give it.
  // On the command line it is an error that names the new one.
  void Renamed(absl::string_view before, absl::string_view name) {
    renamed_[std::string(before)] = std::string(name);
  }

  // Names options that say the same in different ways. A file or command line that gives one of
  // them another value than its default sets those that it does not give to their defaults.
  void Alternatives(std::vector<std::string> names) { alternatives_.push_back(std::move(names)); }

  // Rows that follow are listed under this title.
  void Group(absl::string_view title) { group_ = std::string(title); }

  // T: std::string, int64_t, double or bool.
  template <typename T>
  Option& Add(absl::string_view name, T* field) {
    const auto type = std::is_same_v<T, bool>      ? Option::Type::kBool
                      : std::is_same_v<T, int64_t> ? Option::Type::kWhole
                      : std::is_same_v<T, double>  ? Option::Type::kReal
                                                   : Option::Type::kText;
    return AddRow(
        name, type, [field](absl::string_view text) { return ParseOption(text, field); },
        [field] { return PrintOption(*field); });
  }

  // Adds an enum option. Its texts are the results of Name(value), which `parse` reads.
  template <typename Enum>
  Option& Add(absl::string_view name, Enum* field,
              absl::StatusOr<Enum> (*parse)(absl::string_view text)) {
    return AddRow(
        name, Option::Type::kText,
        [field, parse](absl::string_view text) -> absl::Status {
          BURST_ASSIGN_OR_RETURN(*field, parse(text));
          return absl::OkStatus();
        },
        [field] { return std::string(Name(*field)); });
  }

  // Adds an enum option. Its texts are in `names`, which must outlive the table.
  template <typename Enum, size_t n>
  Option& Add(absl::string_view name, Enum* field, const EnumName<Enum> (&names)[n]) {
    return AddRow(
        name, Option::Type::kText,
        [field, &names](absl::string_view text) -> absl::Status {
          BURST_ASSIGN_OR_RETURN(*field, ParseName(text, names));
          return absl::OkStatus();
        },
        [field, &names] { return std::string(NameOf(*field, names)); });
  }

  // Adds an enum of which "true" and "false" are two of the names: --name means --name=true, and
  // --noname means --name=false.
  template <typename Enum, size_t n>
  Option& AddSwitch(absl::string_view name, Enum* field, const EnumName<Enum> (&names)[n]) {
    Option& row = Add(name, field, names);
    row.type = Option::Type::kBool;
    row.set = [set = std::move(row.set)](absl::string_view text) {
      bool flag = false;  // a bool option's other texts, such as 1, are valid
      return set(ParseOption(text, &flag).ok() ? PrintOption(flag) : text);
    };
    return row;
  }

  // A list of different enums or numbers, separated by commas. An empty text is an empty list.
  template <typename T>
  Option& AddList(absl::string_view name, std::vector<T>* field,
                  absl::StatusOr<T> (*parse)(absl::string_view text)) {
    return AddRow(
        name, Option::Type::kText,
        [field, parse](absl::string_view text) -> absl::Status {
          BURST_ASSIGN_OR_RETURN(*field, ParseList(text, parse));
          return absl::OkStatus();
        },
        [field] { return PrintList(*field); });
  }

  // A row of another program's table, with its field, bounds and help, to which `remark` is added.
  Option& AddShared(const OptionTable& other, absl::string_view name,
                    absl::string_view remark = "");
  // The rows of a group of another program's table, without those that this table has already.
  void AddSharedGroup(const OptionTable& other, absl::string_view group,
                      absl::string_view remark = "");

  const std::vector<Option>& options() const { return options_; }
  bool Has(absl::string_view name) const { return Find(name) != nullptr; }
  // The option must exist.
  const Option& operator[](absl::string_view name) const;
  Option& operator[](absl::string_view name);
  // Whether its value is not the default.
  bool Given(absl::string_view name) const;
  // Whether the command line or a file gave its value, also if that is the default.
  bool Named(absl::string_view name) const { return (*this)[name].named; }

  // The options whose values in `after`, a table of the same options, differ from those of
  // `before`:
  // "--zero=1".
  static std::vector<std::string> Changes(const OptionTable& before, const OptionTable& after);
  // The sentences of the options that are given, one behind the other.
  std::string Sentences() const;

  // Sets an option from its text. InvalidArgument, naming the option and what would be valid; for
  // an unknown option, the one whose name is nearest.
  absl::Status Set(absl::string_view name, absl::string_view text);

  // Applies --name=value, --name value, --flag and --noflag, in order, then checks the bounds.
  // There are no positional arguments.
  absl::Status ParseArguments(int argc, char** argv);

  // Whether all values are within the bounds of their rows.
  absl::Status CheckBounds() const;

  // A JSON object whose keys are names of options. `saved`: of an earlier run, whose value of an
  // option that may change is left out if the option no longer takes it.
  absl::Status ParseJson(absl::string_view json, bool saved = false);
  // Errors name the path.
  absl::Status ParseFile(const std::string& path, bool saved = false);
  // All options but those that are not saved.
  std::string ToJson() const;

  std::string Help(absl::string_view introduction) const;

  // Whether a run made with the values of `before` may continue with those of `after`, a table of
  // the same options: FailedPrecondition that names the first option that must agree and does not.
  static absl::Status CheckResume(const OptionTable& before, const OptionTable& after);

 private:
  template <typename T>
  static std::string PrintList(const std::vector<T>& values) {
    std::string text;
    for (const T& value : values) {
      absl::StrAppend(&text, text.empty() ? "" : ",");
      if constexpr (std::is_enum_v<T>) {
        absl::StrAppend(&text, Name(value));
      } else {
        absl::StrAppend(&text, PrintOption(value));
      }
    }
    return text;
  }
  template <typename T>
  static absl::StatusOr<std::vector<T>> ParseList(absl::string_view text,
                                                  absl::StatusOr<T> (*parse)(absl::string_view)) {
    std::vector<T> values;
    if (text.empty()) return values;
    for (absl::string_view part : absl::StrSplit(text, ',')) {
      BURST_ASSIGN_OR_RETURN(const T value, parse(part));
      for (const T& other : values) {
        if (value == other)
          return absl::InvalidArgumentError(
              absl::StrCat("must not repeat a value; got ", part, " twice"));
      }
      values.push_back(value);
    }
    return values;
  }
  Option& AddRow(absl::string_view name, Option::Type type,
                 std::function<absl::Status(absl::string_view)> set,
                 std::function<std::string()> get);
  const Option* Find(absl::string_view name) const;
  absl::Status Unknown(absl::string_view name) const;
  // Ends a reading: the alternatives to what it gave are at their defaults.
  void EndReading();

  std::string group_;
  std::vector<Option> options_;                 // in the order of the help
  std::map<std::string, std::string> removed_;  // advice by name
  std::map<std::string, std::string> renamed_;  // the new name by the old one
  std::vector<std::vector<std::string>> alternatives_;
  int reading_ = 1;  // the number of the reading in progress
};

// Prints `help` or the version if the command line asks for --help or --version. Returns whether it
// did; the program then ends with ExitWithOutput.
bool PrintHelpOrVersion(int argc, char** argv, const std::string& help);

}  // namespace burst
