// A regular expression that cuts a text into pieces, with the meaning that it has in tiktoken
// (Rust's regex) and tokenizers (Oniguruma): PCRE2, told what these take for a letter, a number or
// a space.
#pragma once

#include <pcre2.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

// Compiled; any thread may use it through a PatternMatcher of its own.
class SplitPattern {
 public:
  // InvalidArgument says which part is wrong or not supported. A match may depend on the text after
  // it but not before it (no lookbehind), so that a text can be cut at any end of a piece.
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

// For one thread.
class PatternMatcher {
 public:
  static constexpr size_t kMore = absl::string_view::npos;

  explicit PatternMatcher(std::shared_ptr<const SplitPattern> pattern);

  // The length of the piece that `text` begins with: a match, or what lies before the next match.
  // `text` is UTF-8 and not empty. Unless it is `complete`, kMore where the piece depends on what
  // would follow. ResourceExhausted for a pattern that takes too long: more steps for one piece
  // than PCRE2 allows, or over all pieces more than kStepsPerByte.
  absl::StatusOr<size_t> FirstPiece(absl::string_view text, bool complete);

 private:
  struct Free {
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
    void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
    void operator()(pcre2_jit_stack* stack) const { pcre2_jit_stack_free(stack); }
  };

  // PCRE2's steps back, which are what can take long. Ordinary patterns take a few for a byte.
  static constexpr uint32_t kFirstSteps = 4096, kMostSteps = 10'000'000;
  static constexpr int64_t kStepsPerByte = 1000, kFreeSteps = 4 * int64_t{kMostSteps};

  int Match(absl::string_view text, uint32_t options, uint32_t steps);

  std::shared_ptr<const SplitPattern> pattern_;
  int64_t steps_ = 0;  // of matches that took more than kFirstSteps
  int64_t bytes_ = 0;  // of the pieces
  std::unique_ptr<pcre2_match_data, Free> data_;
  std::unique_ptr<pcre2_match_context, Free> context_;
  std::unique_ptr<pcre2_jit_stack, Free> stack_;
};

}  // namespace burst
