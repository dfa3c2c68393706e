// Tests the patterns that cut text into words: those of Oniguruma, which tokenizers uses, by PCRE2.
#include "train/tokenizer/split_pattern.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace burst {
namespace {

// A pattern that needs exponential time ends with an error.
TEST(SplitPattern, EndsInTime) {
  const auto pattern = SplitPattern::Compile("(?:a+)+b");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  PatternMatcher matcher(*pattern);
  const std::string text = std::string(40, 'a') + "cb";
  EXPECT_EQ(matcher.FirstPiece(text, true).status().code(), absl::StatusCode::kResourceExhausted);
}

// The pattern takes nearly the longest allowed time for every piece.
TEST(SplitPattern, StepsAreBoundedOverAllPieces) {
  const auto pattern = SplitPattern::Compile("(?:a|a)*b|.");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  PatternMatcher matcher(*pattern);
  const std::string word = std::string(20, 'a') + " ";
  absl::Status status;
  int words = 0;
  for (; status.ok() && words < 1000; ++words) {
    for (size_t at = 0; at < word.size() && status.ok(); ++at) {
      status = matcher.FirstPiece(absl::string_view(word).substr(at), true).status();
    }
  }
  EXPECT_EQ(status.message(),
            "the tokenizer's pattern takes too long: more than 1000 steps a byte");
  EXPECT_LT(words, 50);
}

// Ordinary patterns look back over a long piece.
TEST(SplitPattern, LongPiecesAreNoBombs) {
  const auto pattern = SplitPattern::Compile("\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+|\\S");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  PatternMatcher matcher(*pattern);
  const std::string spaces(500'000, ' ');
  for (int i = 0; i < 20; ++i) {
    const auto piece = matcher.FirstPiece(spaces + "a", true);
    ASSERT_TRUE(piece.ok()) << piece.status();
    EXPECT_EQ(*piece, spaces.size() - 1);
  }
}

// The characters are those that Unicode 15 and 16 added, and one that PCRE2 alone takes for a
// space.
TEST(SplitPattern, ClassesAreThoseOfTokenizers) {
  const struct {
    const char *pattern, *text;
    bool matches;
  } cases[] = {{"\\p{L}", "\xF0\xB1\x8D\x90", true},  // U+31350
               {"[\\p{L}]", "\xF0\xB1\x8D\x90", true}, {"\\p{Lo}", "\xF0\xB1\x8D\x90", true},
               {"\\P{L}", "\xF0\xB1\x8D\x90", false},  {"\\p{N}", "\xF0\xB1\x8D\x90", false},
               {"\\p{N}", "\xF0\x90\xB5\x80", true},  // U+10D40
               {"\\s", "\xE1\xA0\x8E", false},        // U+180E
               {"\\S", "\xE1\xA0\x8E", true},          {"\\s", "\xC2\x85", true},
               {"\\s", "\xE3\x80\x80", true},          {"[^\\s]", "\xE3\x80\x80", false}};
  for (const auto& c : cases) {
    const auto pattern = SplitPattern::Compile(c.pattern);
    ASSERT_TRUE(pattern.ok()) << pattern.status();
    PatternMatcher matcher(*pattern);
    // The text comes alone or after an "!", which only the patterns \S, \P and [^ match.
    const std::string twice = absl::StrCat(c.text, c.text);
    const auto piece = matcher.FirstPiece(twice, true);
    ASSERT_TRUE(piece.ok()) << piece.status();
    EXPECT_EQ(*piece == std::string(c.text).size(), c.matches) << c.pattern << " " << c.text;
  }
}

// Oniguruma, which tokenizers uses, reads these parts otherwise than PCRE2.
TEST(SplitPattern, PartsThatDifferAreRefused) {
  for (const char* part :
       {"\\w",    "\\W",       "\\h",     "\\H",     "\\v",     "\\V",           "\\A",
        "\\G",    "[\\w]",     "^",       "(?m)",    "(?s:",    "(?i-s)",        "{,2}",
        "{1,3}+", "{2}+",      "{2}?",    "(?i)",    "\\X",     "\\1",           "\\p{Han}",
        "\\pL",   "\\p{lu}",   "\\p{Cn}", "\\p{Mn}", "(?i:SS)", "(?i:\xC3\x9F)", "(?i:\\x{df})",
        "\\xA0",  "[\\x80-a]", "(?#c)"}) {
    const absl::Status status = SplitPattern::Compile(absl::StrCat("a", part, "b)|.")).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "which is not supported"))
        << part << ": " << status;
  }
  for (const char* pattern :
       {"(?i:a)", "(?i)a", "a{1,3}", "a{2,}?", "a{2}", "\\x{61}+", "a++", "\\d", "(?=a)a", "[\\^$]",
        "\\^", "\\$", "[a{,2}]", "[^\\x00-\\x7F]", "\\x{e9}"}) {
    EXPECT_EQ(SplitPattern::Compile(pattern).status(), absl::OkStatus()) << pattern;
  }
}

// As in tokenizers, an empty match where a piece begins does not count, and hides what else would
// match there.
TEST(SplitPattern, EmptyMatches) {
  const auto pieces = [](const char* pattern, absl::string_view text) {
    const auto compiled = SplitPattern::Compile(pattern);
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    PatternMatcher matcher(*compiled);
    std::vector<size_t> lengths;
    for (; !text.empty(); text.remove_prefix(lengths.back())) {
      lengths.push_back(*matcher.FirstPiece(text, /*complete=*/true));
    }
    return lengths;
  };
  EXPECT_EQ(pieces("\\d?|\\D+", "ab12"), (std::vector<size_t>{1, 1, 1, 1}));
  EXPECT_EQ(pieces("\\d*|\\D+", "\xC3\xA9 12"), (std::vector<size_t>{2, 1, 2}));
  EXPECT_EQ(pieces("(?=(?:\\d{3})+(?!\\d))", "1234567"), (std::vector<size_t>{1, 3, 3}));
}

// As in tokenizers, $ is the end of a line.
TEST(SplitPattern, DollarEndsALine) {
  const auto pattern = SplitPattern::Compile("\\s+$|\\s+|\\S+");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  PatternMatcher matcher(*pattern);
  std::vector<size_t> pieces;
  for (absl::string_view text = "a  \n\n b"; !text.empty(); text.remove_prefix(pieces.back())) {
    pieces.push_back(*matcher.FirstPiece(text, /*complete=*/true));
  }
  EXPECT_EQ(pieces, (std::vector<size_t>{1, 3, 2, 1}));
  EXPECT_EQ(*matcher.FirstPiece("  ", /*complete=*/false), PatternMatcher::kMore);
}

}  // namespace
}  // namespace burst
