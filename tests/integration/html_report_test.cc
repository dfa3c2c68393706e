#include "train/report/html_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/testing/subprocess.h"

namespace burst {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::Pair;

// Writes the folder of a run of three steps, with `lr` among its options.
std::string MakeRun(const std::string& name, double loss, const std::string& lr) {
  const std::string folder = FreshTestFolder() + "/" + name;
  std::filesystem::create_directories(folder);
  std::ofstream metrics(folder + "/metrics.jsonl");
  for (int step = 1; step <= 3; ++step) {
    metrics << R"({"step":)" << step << R"(,"tokens":)" << 1000 * step << R"(,"loss":)"
            << loss / step << R"(,"lr":0.1,"grad_norm":1.5,"tokens_per_second":)" << 100 * step
            << R"(,"step_ms":10)"
            << (step == 2
                    ? R"(,"val_loss":1.25,"val_loss_ema":1.125,"exposed_ms":2.5,"skipped":true)"
                    : "")
            << "}\n";
  }
  metrics << R"({"step":4,"tok)";  // as after a kill
  std::ofstream(folder + "/config.json") << R"({"lr": )" << lr << R"(, "data": "<text>"})";
  return folder;
}

Result Report(std::vector<std::string> arguments, const std::string& folder) {
  arguments.insert(arguments.begin(), ProgramPath("train/tools/report"));
  return Subprocess(arguments, {folder}).Wait();
}

TEST(HtmlReport, ReadsARun) {
  const auto run = ReadRun(MakeRun("a", 6, "0.5") + "/");
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->name, "a");
  ASSERT_EQ(run->rows.size(), 3u);
  EXPECT_EQ(run->rows[2].loss, 2);
  EXPECT_THAT(run->options, ElementsAre(Pair("lr", "0.5"), Pair("data", "<text>")));
}

TEST(HtmlReport, ALostMessageIsAnError) {
  const std::string folder = MakeRun("a", 6, "0.5");
  const Result result = Subprocess({"/bin/sh", "-c", "\"$0\" \"$1\" > /dev/full",
                                    ProgramPath("train/tools/report"), folder},
                                   {folder})
                            .Wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("standard output: must take what is printed"));
}

TEST(HtmlReport, ComparesRuns) {
  const std::string folder = MakeRun("a", 6, "0.5");
  // 200 tokens/s of 2 FLOPs each are 40 % of 1,000 FLOP/s.
  ASSERT_EQ(WriteRunFacts(folder, {2, 1000, "1 s a step & more", 3 << 19, 65, "once <b>\nupon"}),
            absl::OkStatus());
  RunRecord a = *ReadRun(folder), b = *ReadRun(MakeRun("b", 9, "0.25"));
  b.name = "b & <b>";
  b.rows[1].val_loss = 1.375;
  const std::string page = HtmlReport({a, b});
  // run, steps, tokens, last loss, best validation, the first step at a's last validation loss, of
  // the average, median speed, MFU, exposed, memory, time, skipped
  EXPECT_THAT(page, HasSubstr("<th>best validation</th><th>first step at 1.2500</th>"));
  EXPECT_THAT(page, HasSubstr("<tr><td>a</td><td>3</td><td>3,000</td><td>2.0000</td>"
                              "<td>1.2500</td><td>2</td><td>1.1250</td><td>200</td>"
                              "<td>40.0 %</td><td>25.0 %</td><td>1.5 MiB</td>"
                              "<td>1:05</td><td>1</td></tr>"));
  // b has no facts.
  EXPECT_THAT(
      page, HasSubstr("<td>200</td><td>-</td><td>25.0 %</td><td>-</td><td>-</td><td>1</td></tr>"));
  EXPECT_THAT(page, HasSubstr("<td>a</td><td>1 s a step &amp; more</td><td>0.01 s a step</td>"));
  EXPECT_THAT(page, HasSubstr("<h3>a</h3>\n<pre>once &lt;b&gt;\nupon</pre>"));
  EXPECT_THAT(page, HasSubstr(">MFU</text>"));
  EXPECT_THAT(page, Not(HasSubstr("Pipeline bubble")));
  EXPECT_THAT(page, HasSubstr("<td>b &amp; &lt;b&gt;</td><td>3</td><td>3,000</td><td>3.0000</td>"
                              "<td>1.3750</td><td>-</td>"));
  const size_t differ = page.find("Options that differ"), equal = page.find("<details>");
  EXPECT_LT(differ, page.find("<td>--lr</td><td>0.5</td><td>0.25</td>"));
  EXPECT_LT(page.find("--lr"), equal);
  EXPECT_LT(equal, page.find("<td>--data</td><td>&lt;text&gt;</td>"));
  // Six plots, in the file itself.
  size_t plots = 0;
  for (size_t at = page.find("<svg"); at != std::string::npos; at = page.find("<svg", at + 1)) {
    ++plots;
  }
  EXPECT_EQ(plots, 6u);
  EXPECT_THAT(page, Not(HasSubstr("src=")));
  EXPECT_THAT(page, Not(HasSubstr("href=")));
}

TEST(HtmlReport, TheProgramWritesThePage) {
  const std::string run = MakeRun("a", 6, "0.5"), folder = run + "/..";
  const Result result = Report({"a", "--out=page.html"}, folder);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::string page = ReadAll(folder + "/page.html");
  EXPECT_THAT(page, HasSubstr("<title>a</title>"));
  EXPECT_THAT(page, Not(HasSubstr("Options that differ")));
}

// A page replaces pages, and no file of a run.
TEST(HtmlReport, FilesThatAreNoPagesAreKept) {
  const std::string run = MakeRun("a", 6, "0.5"), folder = run + "/..";
  for (const char* name : {"metrics.jsonl", "config.json"}) {
    const std::string before = ReadAll(run + "/" + name);
    const Result result = Report({"a", std::string("--out=a/") + name}, folder);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.err, HasSubstr("--out: must be a new file or an HTML page; got "));
    EXPECT_EQ(ReadAll(run + "/" + name), before);
  }
  for (int times = 0; times < 2; ++times) {
    EXPECT_EQ(Report({"a", "--out=a/page"}, folder).exit_code, 0);
  }
}

TEST(HtmlReport, ErrorsNameTheFolder) {
  const std::string run = MakeRun("a", 6, "0.5"), folder = run + "/..";
  EXPECT_EQ(Report({}, folder).exit_code, 2);
  EXPECT_THAT(Report({}, folder).err, HasSubstr("RUN: must be from 1 to 6 folders of runs; got 0"));
  for (const char* no_run : {"none", "..", "a/metrics.jsonl"}) {
    const Result result = Report({"a", no_run}, folder);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, HasSubstr("RUN: must be a folder of a run, with metrics.jsonl"));
    EXPECT_THAT(result.err, HasSubstr(" without metrics.jsonl; give the --out of a run"));
  }
  std::ofstream(run + "/config.json") << "[]";
  EXPECT_THAT(Report({"a"}, folder).err, HasSubstr("config.json must be a run's options"));
  std::ofstream(run + "/metrics.jsonl") << "";
  EXPECT_THAT(Report({"a"}, folder).err, HasSubstr("no step yet"));
  EXPECT_EQ(Report({"a"}, folder).exit_code, 1);
  std::filesystem::remove(run + "/config.json");
  EXPECT_THAT(Report({"a"}, folder).err, HasSubstr("a without config.json; give"));
}

// A browser shows the page: it draws the table, the plots and the sample, and has no errors.
TEST(HtmlReport, ABrowserShowsThePage) {
  const std::string browser = "/usr/bin/chromium";
  if (!std::filesystem::exists(browser)) GTEST_SKIP() << browser << " is not installed";
  const std::string run = MakeRun("a", 6, "0.5"), folder = run + "/..";
  ASSERT_EQ(WriteRunFacts(run, {2, 1000, "1 s a step", 3 << 19, 65, "once upon"}),
            absl::OkStatus());
  ASSERT_EQ(Report({"a", "--out=page.html"}, folder).exit_code, 0);
  // The script runs after the page is laid out. It writes the sizes of what is visible.
  std::ofstream(folder + "/page.html", std::ios::app) << R"(<script>
    const sizes = [...document.querySelectorAll("table, svg, pre, path.color0")].map(element => {
      const box = element.getBoundingClientRect();
      return element.tagName.toLowerCase() + (box.width > 30 && box.height > 5 ? "+" : "-");
    });
    document.title = sizes.join(" ");
  </script>)";
  const Result shown =
      Subprocess({browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                  "--user-data-dir=" + folder + "/browser", "file://" + folder + "/page.html"},
                 {folder, false, "-browser"})
          .Wait();
  ASSERT_EQ(shown.exit_code, 0) << shown.err;
  const size_t begin = shown.out.find("<title>") + 7, end = shown.out.find("</title>");
  ASSERT_LT(begin, end) << shown.out;
  const std::string sizes = shown.out.substr(begin, end - begin);
  EXPECT_THAT(sizes, HasSubstr("table+ svg+"));
  EXPECT_THAT(sizes, HasSubstr("path+"));
  EXPECT_THAT(sizes, HasSubstr("pre+"));
  EXPECT_THAT(sizes, Not(HasSubstr("svg-")));
}

}  // namespace
}  // namespace burst
