#include "train/generate/prompt_lines.h"

#include <sys/types.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

absl::Status WriteLine(const Json& json) {
  const std::string line = json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  std::fwrite(line.data(), 1, line.size(), stdout);
  BURST_RETURN_IF_ERROR(FlushOutput());
  if (std::ferror(stdout) == 0) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("cannot write to standard output: ", std::strerror(EPIPE)));
}

}  // namespace

absl::Status PromptLines::Open() {
  file_.reset(path_ == "-" ? stdin : std::fopen(ResolvePath(path_).c_str(), "rb"));
  if (file_ != nullptr) return absl::OkStatus();
  return InvalidOption("prompts", "cannot read ", path_, ": ", std::strerror(errno));
}

absl::Status PromptLines::Error(absl::string_view what) const {
  return InvalidOption("prompts", path_, ": line ", line_, ": ", what);
}

absl::StatusOr<std::optional<std::string>> PromptLines::Next() {
  char* buffer = nullptr;
  size_t capacity = 0;
  std::string line;
  ssize_t bytes = 0;
  do {
    bytes = getline(&buffer, &capacity, file_.get());
    line.assign(buffer, bytes > 0 ? bytes : 0);
    ++line_;
  } while (bytes > 0 && line.find_first_not_of(" \t\r\n") == std::string::npos);
  std::free(buffer);
  if (std::ferror(file_.get()) != 0) return Error("cannot be read");
  if (bytes <= 0) return std::optional<std::string>();
  const absl::StatusOr<Json> json = ParseJson<Json>(line);
  if (!json.ok()) return Error(json.status().message());
  const Json prompt = json->is_object() ? json->value("prompt", Json()) : *json;
  if (!prompt.is_string()) return Error("must be a JSON text, or an object with a text 'prompt'");
  prompt_ = prompt.get<std::string>();
  text_.clear();
  return std::optional<std::string>(prompt_);
}

bool PromptLines::WritePiece(absl::string_view piece) {
  absl::StrAppend(&text_, piece);
  return !stream_ || WriteLine({{"piece", std::string(piece)}}).ok();
}

absl::Status PromptLines::WriteText() { return WriteLine({{"prompt", prompt_}, {"text", text_}}); }

}  // namespace burst
