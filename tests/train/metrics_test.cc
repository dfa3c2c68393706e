#include "train/report/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"

namespace burst {
namespace {

StepMetrics Row(int64_t step) {
  StepMetrics row;
  row.step = step;
  row.tokens = 100 * step;
  row.loss = 4.0 / static_cast<double>(step) + 1.0 / 3;
  row.lr = 1e-3;
  row.grad_norm = 0.5;
  row.tokens_per_second = 1e4;
  row.step_ms = 10;
  if (step % 2 == 0) row.val_loss = row.loss + 0.1;
  if (step == 4) row.val_loss_ema = row.loss + 0.05;
  if (step == 3) row.pipeline_bubble = 0.125;
  if (step == 3) row.exposed_ms = 2.5;
  return row;
}

std::string Read(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Metrics, OneObjectALineWrittenThrough) {
  const std::string path = testing::TempDir() + "/one.jsonl";
  auto log = MetricsLog::Open(path, 0);
  ASSERT_TRUE(log.ok()) << log.status();
  for (int step = 1; step <= 3; ++step) ASSERT_TRUE(log->Append(Row(step)).ok());
  std::istringstream lines(Read(path));  // while the log is still open
  std::string line;
  for (int step = 1; std::getline(lines, line); ++step) {
    const auto json = nlohmann::json::parse(line);
    EXPECT_EQ(json["step"], step);
    EXPECT_EQ(json["loss"].get<double>(), Row(step).loss) << "no digit is lost";
    EXPECT_EQ(json.contains("val_loss"), step == 2);
    EXPECT_EQ(json.value("pipeline_bubble", 0.0), step == 3 ? 0.125 : 0.0);
    for (const char* key : {"tokens", "lr", "grad_norm", "tokens_per_second", "step_ms"}) {
      EXPECT_TRUE(json[key].is_number()) << key;
    }
  }
  const auto resumed = MetricsLog::Open(path, 3);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_FALSE(resumed->rows()[1].pipeline_bubble.has_value());
  EXPECT_EQ(resumed->rows()[2].pipeline_bubble, 0.125);
  EXPECT_EQ(resumed->rows()[2].exposed_ms, 2.5);
}

TEST(Metrics, NotANumberIsNull) {
  const std::string path = testing::TempDir() + "/nan.jsonl";
  auto log = MetricsLog::Open(path, 0);
  ASSERT_TRUE(log.ok());
  StepMetrics row = Row(1);
  row.loss = std::nan("");
  row.grad_norm = HUGE_VAL;
  row.skipped = true;
  ASSERT_TRUE(log->Append(row).ok());
  const auto json = nlohmann::json::parse(Read(path));
  EXPECT_TRUE(json["loss"].is_null() && json["grad_norm"].is_null());
  EXPECT_EQ(json["skipped"], true);
}

TEST(Metrics, ResumeDropsWhatCameAfterTheCheckpoint) {
  const std::string path = testing::TempDir() + "/resume.jsonl";
  {
    auto log = MetricsLog::Open(path, 0);
    for (int step = 1; step <= 7; ++step) ASSERT_TRUE(log->Append(Row(step)).ok());
  }
  const std::string before = Read(path);
  std::ofstream(path, std::ios::app) << R"({"step":8,"tok)";  // killed while writing
  auto log = MetricsLog::Open(path, 5);
  ASSERT_TRUE(log.ok()) << log.status();
  ASSERT_EQ(log->rows().size(), 5u);
  EXPECT_EQ(log->rows()[3].val_loss, Row(4).val_loss);
  EXPECT_EQ(log->rows()[3].val_loss_ema, Row(4).val_loss_ema);
  for (int step = 6; step <= 7; ++step) ASSERT_TRUE(log->Append(Row(step)).ok());
  EXPECT_EQ(Read(path), before);
}

// Steps increase for any content of the file. Two runs may have written to it at once, or somebody
// has continued from an older checkpoint.
TEST(Metrics, StepsIncreaseAfterAResume) {
  const std::string path = testing::TempDir() + "/order.jsonl";
  std::ofstream file(path);
  for (const char* step : {"1", "2", "2", "1", "3", "-1", "1e300", "2.5", "\"4\"", "null", "5", "4",
                           "99999999999999999999", "6", "9223372036854775807", "8", "7"}) {
    file << R"({"step":)" << step << R"(,"tokens":1})"
         << "\n";
  }
  file << std::string(100000, '[') << "\n{\"step\":7,\"tok";
  file.close();
  for (int time = 0; time < 2; ++time) {  // the second time with the result of the first
    auto log = MetricsLog::Open(path, 7);
    ASSERT_TRUE(log.ok()) << log.status();
    std::vector<int64_t> steps;
    for (const StepMetrics& row : log->rows()) steps.push_back(row.step);
    EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 3, 5, 6, 7}));
    EXPECT_EQ(log->Sync(), absl::OkStatus());
  }
}

TEST(Metrics, NewRunForgetsTheOld) {
  const std::string path = testing::TempDir() + "/new.jsonl";
  std::ofstream(path) << "{\"step\":1,\"tokens\":1}\n";
  auto log = MetricsLog::Open(path, 0);
  ASSERT_TRUE(log.ok());
  EXPECT_EQ(Read(path), "");
  EXPECT_FALSE(MetricsLog::Open("/nowhere/metrics.jsonl", 0).ok());
}

TEST(Plot, DrawsBothCurvesWhateverTheRows) {
  std::vector<StepMetrics> rows;
  EXPECT_TRUE(absl::StrContains(LossPlotSvg("none", rows), "</svg>"));
  rows.push_back(Row(1));
  EXPECT_TRUE(absl::StrContains(LossPlotSvg("one", rows), "class=\"color0\""));
  for (int step = 2; step <= 5000; ++step) rows.push_back(Row(step));
  rows[100].loss = std::nan("");
  const std::string svg = LossPlotSvg("a < b & c", rows);
  EXPECT_TRUE(absl::StrContains(svg, "a &lt; b &amp; c"));
  EXPECT_TRUE(absl::StrContains(svg, "class=\"color1\""));
  EXPECT_FALSE(absl::StrContains(svg, "nan"));
  EXPECT_FALSE(absl::StrContains(svg, "inf"));
  EXPECT_LT(svg.size(), 400000u);
}

}  // namespace
}  // namespace burst
