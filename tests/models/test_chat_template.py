"""The sandboxed chat template."""

import json
from pathlib import Path

import pytest

from kvlease.models.chat_template import ChatTemplate
from kvlease.models.errors import ModelFolderInvalid, TemplateFailed
from kvlease.models.limits import Limits

MESSAGES = [{"role": "user", "content": "Hello"}]


def render(source: str, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(MESSAGES)


def test_a_folders_template_is_rendered(tiny: Path) -> None:
    template = ChatTemplate.load(tiny)
    assert template is not None
    assert template.render(MESSAGES) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(MESSAGES, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_templates_are_found_in_both_places(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    configuration = tmp_path / "tokenizer_config.json"
    configuration.write_text(json.dumps({"chat_template": "old", "bos_token": {"content": "<s>"}}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "old"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}named"}]
    configuration.write_text(json.dumps({"chat_template": several, "bos_token": {"content": "<s>"}}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "<s>named"
    (tmp_path / "chat_template.jinja").write_text("new {{ bos_token }}")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "new <s>"


def test_blocks_leave_no_white_space() -> None:
    assert render("{% if true %}\nyes\n  {% endif %}\n") == "yes\n"


def test_the_fields_own_additions_work() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hello"}'
    assert render("{{ {'ü': '<&>'} | tojson(indent=1) }}") == '{\n "ü": "<&>"\n}'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}kept{% endgeneration %}!") == "kept!"
    assert render("{{ tools is none }}{{ missing is defined }}") == "TrueFalse"


def test_a_templates_own_refusal_reaches_the_client() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must\nalternate') }}")
    assert caught.value.http_status == 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
        "{{ messages[5].role }}",
        "{{ [].index(3) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' | int(base=99) + none }}",
        "{{ raise_exception('long ' * 1000) }}",
    ],
)
def test_any_error_of_a_template_is_one_short_line(source: str) -> None:
    with pytest.raises(TemplateFailed) as caught:
        render(source)
    assert len(str(caught.value)) <= 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(100000000) %}a{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateFailed):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages[0].content.__doc__ }}",
        "{{ messages[0]['content']['__class__'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages|attr('__class__') }}",
        "{{ messages|map(attribute='__class__')|join }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_attributes_that_begin_with_an_underscore_are_empty(source: str) -> None:
    assert render(source) == ""


@pytest.mark.parametrize("source", ["{{ 'a' * 17000000 }}", "{{ 17000000 * [1] }}", "{{ 9 ** 99999999 }}"])
def test_a_large_value_is_not_even_made(source: str) -> None:
    with pytest.raises(TemplateFailed, match="is too l"):
        render(source)


def test_small_sums_are_left_alone() -> None:
    assert render("{{ '-' * 3 }}{{ 2 * 3 }}{{ 2 ** 10 }}") == "---61024"


def test_output_is_bounded() -> None:
    template = ChatTemplate(
        "{% for i in range(90) %}{{ 'abcde' }}{% endfor %}", {}, limits=Limits(max_rendered_chars=400)
    )
    with pytest.raises(TemplateFailed, match="longer than 400"):
        template.render(MESSAGES)


def test_a_template_with_a_syntax_error_stops_the_start() -> None:
    with pytest.raises(ModelFolderInvalid, match="syntax error in line 2"):
        ChatTemplate("\n{% if %}", {})
