// Finds the documents of a single text: blocks between blank lines. Blank lines belong to the
// document before them, or at the text's beginning to the first document.
//
// Threads read the text in pieces and do not know the text before theirs. So a piece has a summary,
// and the state at its beginning follows from the summaries of earlier pieces.
#pragma once

#include <cstdint>

namespace burst {

// The state after the text so far, which tells whether the next character begins a document.
struct LineState {
  bool line_has_content = false;  // the current line has content
  bool after_blank = false;       // the line before it is blank
  bool content = false;           // some earlier line has content
  int64_t line_start = 0;         // the position where the current line starts

  // Takes the next character, at position `at`; positions count characters or bytes. Returns true
  // if a document starts at line_start.
  bool Next(uint32_t character, int64_t at) {
    if (character == '\n') {
      after_blank = !line_has_content;
      line_has_content = false;
      line_start = at + 1;
      return false;
    }
    if (line_has_content || character == ' ' || character == '\t' || character == '\r') {
      return false;
    }
    line_has_content = true;
    const bool starts = after_blank && content;
    content = true;
    return starts;
  }
};

// Gives the state after a piece for every state before it.
class PieceLines {
 public:
  // Takes the next character of the piece; `at` counts from the piece's beginning.
  void Next(uint32_t character, int64_t at) {
    if (character == '\n') {
      if (newlines_ == 0) first_has_content_ = state_.line_has_content;
      if (newlines_ < 2) ++newlines_;
    }
    state_.Next(character, at);
  }

  // Returns the state after the piece, which begins at `position` of the text.
  LineState After(const LineState& before, int64_t position) const {
    LineState after = before;
    after.content |= state_.content;
    if (newlines_ == 0) {
      after.line_has_content |= state_.line_has_content;
      return after;
    }
    after.line_has_content = state_.line_has_content;
    after.line_start = position + state_.line_start;
    // The line before the last newline began before the piece, or in it.
    after.after_blank =
        newlines_ == 1 ? !before.line_has_content && !first_has_content_ : state_.after_blank;
    return after;
  }

 private:
  LineState state_;                 // as if the text began here
  int newlines_ = 0;                // 2: or more
  bool first_has_content_ = false;  // the part of a line before the first newline
};

}  // namespace burst
