// A regular expression that cuts a text into pieces, with its meaning in tokenizers (Oniguruma). It
// is run by PCRE2 with Oniguruma's definitions of a letter, a number, a space and the end of a
// line.
#pragma once

#include <pcre2.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

// A compiled pattern, which any thread may use through its own PatternMatcher.
class SplitPattern {
 public:
  // Compiles a pattern. InvalidArgument says which part is wrong or not supported. A match may
  // depend on the text after it but not before it (no lookbehind), so a text can be cut at any end
  // of a piece.
  static absl::StatusOr<std::shared_ptr<const SplitPattern>> Compile(absl::string_view pattern);

  const pcre2_code* code() const { return code_.get(); }
  bool has_jit() const { return has_jit_; }

 private:
  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };
  explicit SplitPattern(pcre2_code* code) : code_(code) {}

  std::unique_ptr<pcre2_code, Free> code_;
  bool has_jit_ = false;
};

// Matches on one thread.
class PatternMatcher {
 public:
  static constexpr size_t kMore = absl::string_view::npos;

  explicit PatternMatcher(std::shared_ptr<const SplitPattern> pattern);

  // Returns the length of the first piece of `text`: a match, or the text before the next match.
  // `text` is UTF-8 and not empty. If it is not `complete`, returns kMore if the piece depends on
  // later text. ResourceExhausted means that the pattern takes too long: more steps for a piece
  // than PCRE2 allows, or more than kStepsPerByte over all pieces.
  absl::StatusOr<size_t> FirstPiece(absl::string_view text, bool complete);
  // Returns whether the last piece was a match.
  bool matched() const { return matched_; }

 private:
  struct Free {
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
    void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
    void operator()(pcre2_jit_stack* stack) const { pcre2_jit_stack_free(stack); }
  };

  // PCRE2's steps back, which can take long. Ordinary patterns take a few for a byte.
  static constexpr uint32_t kFirstSteps = 4096, kMostSteps = 10'000'000;
  static constexpr int64_t kStepsPerByte = 1000, kFreeSteps = 4 * int64_t{kMostSteps};

  int Match(absl::string_view text, size_t begin, uint32_t options, uint32_t steps);
  // Returns what Match returns with enough steps.
  absl::StatusOr<int> MatchInTime(absl::string_view text, size_t begin, uint32_t options);

  std::shared_ptr<const SplitPattern> pattern_;
  bool matched_ = false;
  int64_t steps_ = 0;  // the steps of matches that took more than kFirstSteps
  int64_t bytes_ = 0;  // the bytes of all pieces
  std::unique_ptr<pcre2_match_data, Free> data_;
  std::unique_ptr<pcre2_match_context, Free> context_;
  std::unique_ptr<pcre2_jit_stack, Free> stack_;
};

}  // namespace burst
