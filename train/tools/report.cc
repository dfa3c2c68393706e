// bazel run //train:report: writes a page about runs.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "train/report/html_report.h"

namespace burst {
namespace {

int Main(int argc, char** argv) {
  std::string out = "report.html";
  OptionTable options;
  options.Group("Options");
  options.Add("out", &out).Help("Write this HTML file.");
  const std::string help = options.Help(
      "Writes one page of a run, or of several side by side: losses, speed, options that differ.\n"
      "The file needs no other and opens in any browser.\n\n"
      "  bazel run //train:report -- runs/a runs/b --out=report.html\n");
  if (PrintHelpOrVersion(argc, argv, help)) return ExitWithOutput();
  std::vector<std::string> folders;
  while (argc > 1 && argv[1][0] != '-') {
    folders.push_back(ResolvePath(argv[1]));
    argv[1] = argv[0];
    --argc, ++argv;
  }
  absl::Status usage = options.ParseArguments(argc, argv);
  if (usage.ok() && (folders.empty() || folders.size() > kMaxReportRuns)) {
    usage = absl::InvalidArgumentError(absl::StrCat("RUN: must be from 1 to ", kMaxReportRuns,
                                                    " folders of runs; got ", folders.size(),
                                                    "; give runs/a runs/b"));
  }
  if (!usage.ok()) return ExitCode(usage, kExitBadUsage);
  if (out.empty()) usage = InvalidOption("out", "must be a file; got ''; give --out=report.html");
  if (!usage.ok()) return ExitCode(usage, kExitBadUsage);
  const std::string path = ResolvePath(out);
  usage = CheckReplaceable("out", path, "<!doctype html>", "an HTML page");
  if (!usage.ok()) return ExitCode(usage, kExitBadUsage);
  std::vector<RunRecord> runs;
  for (const std::string& folder : folders) {
    absl::StatusOr<RunRecord> run = ReadRun(folder);
    if (!run.ok()) return ExitCode(run.status(), kExitFailure);
    runs.push_back(*std::move(run));
  }
  const absl::Status written = WriteFileAtomically(path, HtmlReport(runs));
  if (!written.ok()) return ExitCode(written, kExitFailure);
  std::printf("The report is %s\n", path.c_str());
  return ExitWithOutput();
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
