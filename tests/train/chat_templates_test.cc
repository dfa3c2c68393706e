// Tests which text a chat template gives and which parts of it count, case by case.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/train/chats_fixture.h"

namespace burst {
namespace {

using Json = nlohmann::json;
using ChatTemplatesTest = RenderedChatsTest;

// Tags in a comment or in raw text mark nothing, so the messages are found by prefixes.
TEST_F(ChatTemplatesTest, TagsInACommentAreNoMarks) {
  for (const char* tags : {"{# {% generation %} #}", "{% raw %}{% generation %}{% endraw %}"}) {
    Write("model/chat_template.jinja", absl::StrCat(tags, kTemplate));
    ASSERT_EQ(Render(kChat).exit_code, 0) << tags;
    const Json row = Json::parse(ReadAll(folder_ + "/rendered.jsonl"));
    const std::string text = row["text"];
    ASSERT_EQ(row["counted"].size(), 1u);
    EXPECT_EQ(text.substr(row["counted"][0][0]), "<assistant>b");
  }
}

// A template that changes what its tags mark leaves nothing of the marks in the data.
TEST_F(ChatTemplatesTest, FilteredMarksAreAnError) {
  Write("model/chat_template.jinja",
        "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x|upper }}");
  ExpectOneError(Render(kChat), "must not change what its generation tags mark");
  for (const char* use : {"{{ x|trim }}", "{{ x[:9] }}", "{{ x|length }}",
                          "{% if x.startswith(' b') %}{{ x }}{% endif %}"}) {
    Write("model/chat_template.jinja",
          absl::StrCat("{% set x %}{% generation %} {{ messages[-1].content }}{% endgeneration %}"
                       "{% endset %}",
                       use));
    ExpectOneError(Render(kChat), "must not change what its generation tags mark");
  }
}

// Marks of the template and messages of other roles may overlap. Each byte counts once.
TEST_F(ChatTemplatesTest, RangesThatOverlapAreOne) {
  Write("model/chat_template.jinja",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}");
  ASSERT_EQ(Render(R"({"messages": [{"role": "user", "content": "Hi é"},)"
                   R"( {"role": "assistant", "content": "Hello"}]})",
                   {"--roles=assistant,user"})
                .exit_code,
            0);
  EXPECT_EQ(Counted(), (std::vector<Strings>{{"Hi é|Hello"}}));
}

// Answers begin behind their header, whatever else the template writes into a prompt, and end
// before an end that only the last message has.
TEST_F(ChatTemplatesTest, AnswersWithoutMarks) {
  const std::string lines =
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},)"
      R"( {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})"
      "\n";
  const auto counted = [&](const std::string& text) {
    Write("model/chat_template.jinja", text);
    const Result result = Render(lines);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return Counted();
  };
  const std::string all = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
  EXPECT_EQ(counted(all + "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"),
            (std::vector<Strings>{{"b</>", "d</>"}}));
  EXPECT_EQ(counted(all + "{% if add_generation_prompt %}<assistant>{% else %}<eos>{% endif %}"),
            (std::vector<Strings>{{"b</>", "d</><eos>"}}));
  // The prompt's header is not the answer's.
  Write("model/chat_template.jinja", all + "{% if add_generation_prompt %}Assistant:{% endif %}");
  ExpectOneError(Render(lines), "renders what is before message 1 differently without it");
  // The template writes an answer in another way once another question follows.
  Write("model/chat_template.jinja",
        "{% for m in messages %}<{{ m.role }}>{{ '<think>' if loop.last }}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}");
  ExpectOneError(Render(lines),
                 "renders message 1 differently when others follow; give a template");
}

// The first message may be an answer. What the template writes before it does not count.
TEST_F(ChatTemplatesTest, AnAnswerMayBeFirst) {
  const std::string line = R"({"messages": [{"role": "assistant", "content": "Welcome"}]})";
  const std::string all =
      "<system>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
  Write("model/chat_template.jinja", all + "{% if add_generation_prompt %}<assistant>{% endif %}");
  const Result result = Render(line);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(Counted(), (std::vector<Strings>{{"Welcome"}}));
  Write("model/chat_template.jinja", "{{ messages[0].role }}" + all);
  ExpectOneError(Render(line), "cannot render it");
}

// Values that are null are left out, and what a model thought has the names that templates read,
// as in transformers.
TEST_F(ChatTemplatesTest, NullsAndThoughts) {
  Write("model/chat_template.jinja",
        "{% for m in messages %}<{{ m.content }}{{ 'T' if 'tool_calls' in m }}|"
        "{{ m.reasoning_content }}|{{ m.thinking }}>{% endfor %}");
  const auto message = [](const std::string& more) {
    return R"({"messages": [{"role": "assistant", )" + more + "}]}\n";
  };
  const Result result = Render(message(R"("content": null, "tool_calls": null)") +
                                   message(R"("content": "a", "reasoning": "r")") +
                                   message(R"("content": "a", "thinking": "t")") +
                                   message(R"("content": "a", "reasoning_content": "c")") +
                                   message(R"("thinking": "t", "reasoning_content": "c")"),
                               {"--roles=assistant"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(Texts(), (Strings{"<||>", "<a|r|r>", "<a|t|t>", "<a|c|c>", "<|c|t>"}));
}

// A line's tools may be a text of JSON. A model may have a template of its own for chats with
// tools. Arguments of the line win over special tokens.
TEST_F(ChatTemplatesTest, ToolsAndArguments) {
  Write("model/chat_template.jinja",
        "{{ bos_token }}{{ image_token }}{% for t in tools or [] %}"
        "[{{ t.name }}]{% endfor %}{{ messages[0].content }}");
  Write("model/tokenizer_config.json",
        R"({"bos_token": "<bos>", "extra_special_tokens": {"image_token": "<image>"}})");
  const std::string chat = R"({"messages": [{"role": "user", "content": "a"}])";
  const std::string lines = chat +
                            R"(, "tools": "[{\"name\": \"f\"}]", "chat_template_kwargs": null})" +
                            "\n" + chat + R"(, "tools": [{"name": "g"}]})" + "\n" + chat +
                            R"(, "chat_template_kwargs": {"bos_token": "<B>"}})" + "\n";
  ASSERT_EQ(Render(lines, {"--roles=user"}).exit_code, 0);
  EXPECT_EQ(Texts(), (Strings{"<bos><image>[f]a", "<bos><image>[g]a", "<B><image>a"}));
  std::filesystem::create_directories(folder_ + "/model/additional_chat_templates");
  Write("model/additional_chat_templates/tool_use.jinja", "with tools");
  ASSERT_EQ(Render(lines, {"--roles=user"}).exit_code, 0);
  EXPECT_EQ(Texts(), (Strings{"with tools", "with tools", "<B><image>a"}));
  std::filesystem::remove_all(folder_ + "/model/additional_chat_templates");
  std::filesystem::remove(folder_ + "/model/chat_template.jinja");
  Write("model/tokenizer_config.json", R"({"chat_template": [
      {"name": "default", "template": "default"}, {"name": "tool_use", "template": "with tools"}]})");
  ASSERT_EQ(Render(lines, {"--roles=user"}).exit_code, 0);
  EXPECT_EQ(Texts(), (Strings{"with tools", "with tools", "default"}));
}

// A template's file takes the special tokens of --tokenizer. It does not go on without them.
TEST_F(ChatTemplatesTest, ATemplateOfAnotherPlace) {
  std::filesystem::create_directories(folder_ + "/other");
  Write("other/mine.jinja", "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}");
  const Strings file = {"--template=other/mine.jinja"};
  ExpectOneError(Render(kChat, file), "must have tokenizer_config.json, because the template");
  ExpectOneError(Render(kChat, {file[0], "--tokenizer=none"}), "--tokenizer: must be a folder");
  ASSERT_EQ(Render(kChat, {file[0], "--tokenizer=model"}).exit_code, 0);
  EXPECT_EQ(Texts(), (Strings{"<bos>ab"}));
  const std::string pair = R"({"prompt": "a", "completion": "b"})";
  Write("other/mine.jinja", kTemplate);
  ASSERT_EQ(Render(kChat, file).exit_code, 0);
  ExpectOneError(Render(pair, file), "a completion ends with eos_token");
  ExpectOneError(Render(kChat, {"--template=model/tokenizer_config.json"}), "give its folder");
  // A base model's folder has no template, which texts do not need.
  ASSERT_EQ(Render(pair).exit_code, 0);
  ExpectOneError(Render(kChat), "must be a folder with chat_template.jinja");
}

// A prompt begins with the tokens that the tokenizer puts before a text: those of tokenizer.json,
// else BOS if the configuration adds it.
TEST_F(ChatTemplatesTest, PromptsBeginAsTheTokenizersTexts) {
  Write("model/chat_template.jinja", kTemplate);
  const auto text = [&] {
    const Result result = Render(R"({"prompt": "2 + 2 =", "completion": " 4"})");
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const Json row = Json::parse(ReadAll(folder_ + "/rendered.jsonl"));
    const std::string all = row["text"];
    EXPECT_EQ(all.substr(row["counted"][0][0]), " 4<eos>");
    return all;
  };
  const Json begins = Json::parse(R"({"type": "TemplateProcessing", "single": [
      {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
      {"SpecialToken": {"id": "</s>", "type_id": 0}}]})");
  Json tokenizer = Json::parse(ReadAll(folder_ + "/model/tokenizer.json"));
  for (const auto& [processor, beginning] :
       {std::pair(Json(), ""), std::pair(begins, "<s>"),
        std::pair(Json{{"type", "Sequence"},
                       {"processors", Json::array({Json{{"type", "ByteLevel"}}, begins})}},
                  "<s>"),
        std::pair(Json{{"type", "RobertaProcessing"}, {"cls", Json::array({"<c>", 0})}}, "<c>")}) {
    tokenizer["post_processor"] = processor;
    Write("model/tokenizer.json", tokenizer.dump());
    EXPECT_EQ(text(), absl::StrCat(beginning, "2 + 2 = 4<eos>")) << processor;
  }
  tokenizer["post_processor"] = nullptr;
  Write("model/tokenizer.json", tokenizer.dump());
  Write("model/tokenizer_config.json",
        R"({"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": true})");
  EXPECT_EQ(text(), "<bos>2 + 2 = 4<eos>");
}

// Errors of a template, and of the files next to it, name them.
TEST_F(ChatTemplatesTest, BrokenTemplates) {
  const std::pair<const char*, const char*> templates[] = {
      {"{{ 1 / 0 }}", "ZeroDivisionError"},
      {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"},
      {"{{ 9 ** 9999 }}", "must be a Jinja template"},
      {"{% if", "must be a Jinja template"},
      {"\xff", "chat_template.jinja: must be UTF-8"}};
  for (const auto& [text, message] : templates) {
    Write("model/chat_template.jinja", text);
    const Result result = Render(kChat);
    ExpectOneError(result, message);
    EXPECT_TRUE(absl::StrContains(result.err, folder_ + "/model")) << result.err;
    ExpectOneError(Render(kChat, {"--bad_lines=skip"}), message);
  }
  Write("model/chat_template.jinja", kTemplate);
  for (const char* config : {"[1]", "{", "\xff", "null"}) {
    Write("model/tokenizer_config.json", config);
    ExpectOneError(Render(kChat), "model/tokenizer_config.json: must be ");
  }
  Write("model/tokenizer_config.json", "{}");
  for (const char* processor :
       {R"({"type": "TemplateProcessing", "single": null})", "[1]",
        R"({"type": "RobertaProcessing", "cls": null})",
        R"({"type": "RobertaProcessing", "cls": []})",
        R"({"type": "TemplateProcessing", "single": [{"SpecialToken": 1}]})"}) {
    Write("model/tokenizer.json", absl::StrCat(R"({"post_processor": )", processor, "}"));
    ExpectOneError(Render(kChat), "post_processor must be of the library tokenizers");
  }
  Write("model/tokenizer.json", "{}");
  std::filesystem::remove(folder_ + "/model/chat_template.jinja");
  Write("model/tokenizer_config.json", R"({"chat_template": 5})");
  ExpectOneError(Render(kChat), "model/tokenizer_config.json: chat_template must be a text");
}

}  // namespace
}  // namespace burst
