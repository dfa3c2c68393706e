// Takes the fields of config.json one by one, so that those that are left are unknown.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace burst {

// The fields of a JSON object. It keeps the first error, which names a field, its value and valid
// values; values read after an error have no meaning. A null counts as a missing field.
class Fields {
 public:
  using Json = nlohmann::json;

  // prefix: stands before the fields' names in messages, such as "rope_scaling.".
  Fields(Json object, std::string prefix);

  const absl::Status& status() const { return status_; }
  bool Names(const std::string& key) const { return object_.count(key) > 0; }  // null, too
  bool Has(const std::string& key) const;

  // Take a field, or return `absent`. Whole: from 0, below 2^31. Size: at least 1; without `absent`
  // the field must be there.
  int64_t Whole(const std::string& key, int64_t absent);
  int64_t Size(const std::string& key);
  int64_t Size(const std::string& key, int64_t absent);
  double Real(const std::string& key, double absent);
  bool Bool(const std::string& key, bool absent);
  std::string Text(const std::string& key, const std::string& absent);
  std::vector<double> Reals(const std::string& key);  // a list; empty if it is missing
  Json Take(const std::string& key);
  // Takes an object's fields, or nothing where it is missing.
  std::optional<Fields> Object(const std::string& key);

  // Takes a field that may have one of these values only.
  void MustBe(const std::string& key, const std::vector<Json>& values);
  void Refuse(const std::string& key, const Json& value, absl::string_view valid);
  void Fail(absl::string_view message);

  // Checks that every field that is left changes nothing.
  absl::Status Finish();

 private:
  Json object_;
  std::string prefix_;
  absl::Status status_;
};

// Returns whether a field changes no result, whatever its value.
bool IsWithoutInfluence(absl::string_view field);

}  // namespace burst
