// Reads prompts from lines of JSON, and writes a line of JSON for each text.
#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

// The lines of --prompts. A line is a text, or an object with the text `prompt`; blank lines do not
// count. A text gives the line {"prompt": TEXT, "text": TEXT} of standard output. With `stream`,
// the lines {"piece": TEXT} of its pieces come before. Bytes that are not UTF-8 become U+FFFD.
class PromptLines {
 public:
  // `path`: "-" is standard input, of which a line is read once the text before it is written.
  PromptLines(std::string path, bool stream) : path_(std::move(path)), stream_(stream) {}

  // Opens the file. InvalidArgument names it.
  absl::Status Open();
  // Returns the next prompt; none at the end. InvalidArgument names the line.
  absl::StatusOr<std::optional<std::string>> Next();
  // Returns the error of the line that was read last.
  absl::Status Error(absl::string_view what) const;

  // Adds a piece to the text of the prompt. Returns false if it cannot be written.
  bool WritePiece(absl::string_view piece);
  // Writes the whole text.
  absl::Status WriteText();

 private:
  struct Close {
    void operator()(std::FILE* file) const {
      if (file != stdin) std::fclose(file);
    }
  };

  const std::string path_;
  const bool stream_;
  std::unique_ptr<std::FILE, Close> file_;
  int64_t line_ = 0;  // of the prompt, from 1
  std::string prompt_, text_;
};

}  // namespace burst
