// Tests every row of the table of conflicts. It is refused, and it is in --help and on the page.
#include "train/config/conflicts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "burst/cli/files.h"
#include "tests/train/config_arguments.h"

namespace burst {
namespace {

std::vector<std::string> Words(absl::string_view text) {
  return absl::StrSplit(text, ' ', absl::SkipEmpty());
}

// Resolves an example on a machine with four GPUs. --comm is for processes of a launcher.
absl::StatusOr<ResolvedConfig> ResolveExample(const std::string& example) {
  Launch launch = {1, 8, 4};
  if (absl::StrContains(example, "--comm")) launch.processes = 2;
  return Resolve(Words(example), launch);
}

TEST(Conflicts, EveryRowIsRefused) {
  for (const TrainConflict& row : TrainConflicts()) {
    const std::string example = absl::StrCat(row.one.example, " ", row.other.example);
    const auto config = ResolveExample(example);
    ASSERT_FALSE(config.ok()) << example;
    const std::string message(config.status().message());
    EXPECT_TRUE(absl::StrContains(message, absl::StrCat("because ", row.why, "; got ")))
        << example << ": " << message;
    EXPECT_TRUE(absl::StrContains(message, row.advice)) << message;
    const std::string name = message.substr(2, message.find(':') - 2);
    const std::vector<std::string> names = Words(row.one.options);
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << message;
  }
}

// Otherwise one side alone would refuse the row.
TEST(Conflicts, EachSideAloneIsAccepted) {
  for (const TrainConflict& row : TrainConflicts()) {
    if (row.one.example[0] == '\0' || row.other.example[0] == '\0') continue;
    for (const TraitText& side : {TraitText(row.one), TraitText(row.other)}) {
      // Offloaded activations always need --recompute.
      const bool offloads = absl::StrContains(side.example, "--offload=activations");
      const auto config =
          ResolveExample(absl::StrCat(side.example, offloads ? " --recompute=full" : ""));
      EXPECT_TRUE(config.ok()) << side.example << ": " << config.status();
    }
  }
}

TEST(Conflicts, AreInTheHelpOfBothOptions) {
  TrainConfig config;
  const OptionTable table = TrainOptions(&config);
  for (const TrainConflict& row : TrainConflicts()) {
    for (const std::string& name : Words(row.one.options)) {
      EXPECT_TRUE(absl::StrContains(table[name].conflicts, row.other.text)) << name;
    }
    if (!absl::StartsWith(row.other.text, "--")) continue;
    for (const std::string& name : Words(row.other.options)) {
      EXPECT_TRUE(absl::StrContains(table[name].conflicts, row.one.text)) << name;
    }
  }
}

TEST(Conflicts, AreOnThePage) {
  const auto page = ReadFile("docs/training/options_together.md", 1 << 20);
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_TRUE(absl::StrContains(*page, ConflictPage()))
      << "the table of docs/training/options_together.md should be:\n"
      << ConflictPage();
}

TEST(TrainHelp, HasAtMost25WordsAnOption) {
  TrainConfig config;
  const OptionTable table = TrainOptions(&config);
  for (const Option& option : table.options()) {
    EXPECT_LE(Words(option.help).size(), 25u) << option.name;
  }
}

TEST(TrainHelp, BeginsWithFifteenOptions) {
  const std::string help = TrainHelp();
  const std::string first = help.substr(0, help.find("Advanced: "));
  int options = 0;
  for (absl::string_view line : absl::StrSplit(first, '\n')) {
    if (absl::StartsWith(line, "  --")) ++options;
  }
  EXPECT_EQ(options, 15);
  EXPECT_TRUE(absl::StrContains(first, "\n  --model=llama_tiny"));
}

}  // namespace
}  // namespace burst
