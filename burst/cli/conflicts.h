// Options that do not go together: one table with a row for each pair. Errors, --help, the planner
// and the tables of docs/training/options_together.md all derive from it.
//
//   constexpr Trait<Config> kExact = {"exact", "--exact", "false", "--exact", [](const Config& c) {
//     return c.exact; }};
//   constexpr Conflict<Config> kConflicts[] = {
//       {kExact, kPipeline, "its sums depend on the number of ranks"}};
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "burst/base/status.h"
#include "burst/cli/options.h"

namespace burst {

// The advice for an option that says nothing with the other one. The error adds its default,
// because a file or a run may have given it.
inline constexpr char kLeaveOut[] = "leave it out";

// One side of a conflict, as text.
struct TraitText {
  // The option that makes it true; several, separated by spaces, if each of them can.
  const char* options;
  // The side as pages and --help call it: "--zero=2 or 3", "without --pp", "on the CPU".
  const char* text;
  // What the option must be for the side not to hold: "0 or 1". nullptr: the option has no such
  // value, so the other side must change.
  const char* must_be;
  // Arguments of a command line with which the side holds, for tests.
  const char* example;
};

template <typename Config>
struct Trait : TraitText {
  constexpr Trait(const char* options, const char* text, const char* must_be, const char* example,
                  bool (*holds)(const Config&))
      : TraitText{options, text, must_be, example}, holds(holds) {}
  bool (*holds)(const Config&);
};

template <typename Config>
struct Conflict {
  Trait<Config> one, other;
  const char* why;
  const char* advice = "leave one of the two out";
};

// InvalidArgument that says what the option must be, with which other one and why, what was given,
// and the advice.
absl::Status ConflictError(const OptionTable& given, const TraitText& one, const TraitText& other,
                           absl::string_view why, absl::string_view advice);

// Adds to the help of each side's options, which `table` may lack, that it does not go with the
// other.
void AddConflictToHelp(const TraitText& one, const TraitText& other, OptionTable* table);

// Writes a Markdown table of conflicts: a row for each other side, with all sides that it refuses,
// "| with `--exact` | `--tp`, `--zero=2` or 3 |".
class ConflictTable {
 public:
  void Add(const TraitText& one, const TraitText& other);
  std::string Markdown() const;

 private:
  struct Row {
    std::string other, refused;
  };
  std::vector<Row> rows_;  // in the order in which their other sides came first
};

// The error of the first conflict that `config` has. `given`: the options as the user gave them.
template <typename Config>
absl::Status CheckConflicts(absl::Span<const Conflict<Config>> conflicts, const Config& config,
                            const OptionTable& given) {
  for (const Conflict<Config>& c : conflicts) {
    if (c.one.holds(config) && c.other.holds(config)) {
      return ConflictError(given, c.one, c.other, c.why, c.advice);
    }
  }
  return absl::OkStatus();
}

// Whether `config` has no conflict.
template <typename Config>
bool Allowed(absl::Span<const Conflict<Config>> conflicts, const Config& config) {
  for (const Conflict<Config>& c : conflicts) {
    if (c.one.holds(config) && c.other.holds(config)) return false;
  }
  return true;
}

template <typename Config>
void AddConflictsToHelp(absl::Span<const Conflict<Config>> conflicts, OptionTable* table) {
  for (const Conflict<Config>& c : conflicts) AddConflictToHelp(c.one, c.other, table);
}

// A Markdown table of all conflicts.
template <typename Config>
std::string ConflictPage(absl::Span<const Conflict<Config>> conflicts) {
  ConflictTable table;
  for (const Conflict<Config>& c : conflicts) table.Add(c.one, c.other);
  return table.Markdown();
}

}  // namespace burst
