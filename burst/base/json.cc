#include "burst/base/json.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace burst {
namespace {

// Adds a member. Returns null if the object already has the key.
nlohmann::json* AddMember(nlohmann::json::object_t& object, std::string& key,
                          std::vector<std::set<std::string>>*) {
  const auto [member, added] = object.try_emplace(std::move(key));
  return added ? &member->second : nullptr;
}

// Adds a member to an ordered object, whose own insertion would compare all members. `keys` has the
// keys of the open objects.
nlohmann::ordered_json* AddMember(nlohmann::ordered_json::object_t& object, std::string& key,
                                  std::vector<std::set<std::string>>* keys) {
  if (!keys->back().insert(key).second) return nullptr;
  object.push_back({std::move(key), nullptr});
  return &object.back().second;
}

// Builds the value that the parser reads. nlohmann's own handler with a callback visits all members
// of an object whenever one of them ends.
template <typename Json>
class Builder {
 public:
  bool null() { return Add(nullptr) != nullptr; }
  bool boolean(bool value) { return Add(value) != nullptr; }
  bool number_integer(typename Json::number_integer_t value) { return Add(value) != nullptr; }
  bool number_unsigned(typename Json::number_unsigned_t value) { return Add(value) != nullptr; }
  bool number_float(typename Json::number_float_t value, const std::string&) {
    return Add(value) != nullptr;
  }
  bool string(std::string& value) {
    const int64_t bytes = Bytes(value);
    return Takes(bytes) && Add(std::move(value)) != nullptr;
  }
  bool binary(typename Json::binary_t&) { return false; }  // JSON text has no binary values

  bool start_object(size_t) { return Open(Json::value_t::object); }
  bool start_array(size_t) { return Open(Json::value_t::array); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }

  bool key(std::string& key) {
    constexpr int64_t kNode = 96;  // bytes of a tree's node with its links and an empty string
    if (!Takes(kNode + Bytes(key))) return false;
    const std::string name = key;
    member_ = AddMember(*open_.back()->template get_ptr<typename Json::object_t*>(), key, &keys_);
    if (member_ != nullptr) return true;
    return Refuse(absl::StrCat("the JSON has the key '",
                               absl::Utf8SafeCEscape(absl::string_view(name).substr(0, 100)),
                               "' twice"));
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) {
    return Refuse("it is not JSON");
  }

  const std::string& error() const { return error_; }
  Json TakeRoot() { return std::move(root_); }

 private:
  bool Refuse(std::string error) {
    error_ = std::move(error);
    return false;
  }

  // Returns the string's bytes on the heap.
  static int64_t Bytes(const std::string& text) {
    constexpr size_t kInPlace = 15;
    const size_t bytes = text.size() > kInPlace ? text.size() + 16 : 0;
    return static_cast<int64_t>(bytes);
  }

  bool Takes(int64_t bytes) {
    bytes_ += bytes;
    if (bytes_ <= kMaxJsonBytes) return true;
    return Refuse(absl::StrCat("the JSON takes more than ", kMaxJsonBytes >> 20, " MiB of memory"));
  }

  // Returns the new value's place in the open array or object, or null if there is no room for it.
  template <typename Value>
  Json* Add(Value&& value) {
    constexpr int64_t kElement = 2 * sizeof(Json);  // a growing array has up to twice its size
    constexpr int64_t kOnHeap = 48;                 // a string, an array or an object
    const bool on_heap = std::is_same_v<std::decay_t<Value>, std::string> ||
                         std::is_same_v<std::decay_t<Value>, typename Json::value_t>;
    if (!Takes(kElement + (on_heap ? kOnHeap : 0))) return nullptr;
    Json* place = &root_;
    if (!open_.empty() && open_.back()->is_array()) {
      auto& array = *open_.back()->template get_ptr<typename Json::array_t*>();
      array.emplace_back();
      place = &array.back();
    } else if (!open_.empty()) {
      place = member_;
    }
    *place = Json(std::forward<Value>(value));
    return place;
  }

  bool Open(typename Json::value_t kind) {
    if (open_.size() == kMaxJsonDepth) {
      return Refuse(absl::StrCat("the JSON is nested more than ", kMaxJsonDepth, " deep"));
    }
    Json* const place = Add(kind);
    if (place == nullptr) return false;
    open_.push_back(place);
    keys_.emplace_back();
    return true;
  }

  bool Close() {
    open_.pop_back();
    keys_.pop_back();
    return true;
  }

  Json root_;
  std::vector<Json*> open_;  // arrays and objects; one grows only while it is the last of them
  std::vector<std::set<std::string>> keys_;  // the keys of each
  Json* member_ = nullptr;                   // the member whose key was read
  int64_t bytes_ = 0;                        // estimated bytes
  std::string error_;
};

}  // namespace

template <typename Json>
absl::StatusOr<Json> ParseJson(absl::string_view text) {
  Builder<Json> builder;
  if (Json::sax_parse(text.begin(), text.end(), &builder)) return builder.TakeRoot();
  return absl::InvalidArgumentError(builder.error());
}

template absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text);
template absl::StatusOr<nlohmann::ordered_json> ParseJson(absl::string_view text);

}  // namespace burst
