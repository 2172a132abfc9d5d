"""Chat templates as Hugging Face's models bring them, and whatever goes wrong in one."""

from datetime import datetime

import pytest
from tests.serve.test_reliability import call, error

from ridgeline.data.examples import BadRecord, Template, find_template
from ridgeline.spec.errors import UserError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def rendered(source, **how):
    return Template(source, "t").render(CHAT, **how)


def test_generation_blocks_write_what_is_in_them():
    source = (
        "{%- for m in messages %}{% if m.role == 'assistant' %}{% generation %}[{{ m.content }}]"
        "{% set x = 1 %}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{{ x is defined }}"
    )
    assert rendered(source) == "Hi[Ho]False"


def test_today_is_known():
    assert rendered("{{ strftime_now('%Y-%m') }}") == datetime.now().strftime("%Y-%m")


def test_tools_and_documents_are_none():
    assert rendered("{{ tools is none }} {{ documents is none }} {{ tools is defined }}") == "True True True"
    assert rendered("{% if tools is not none %}{{ tools | length }}{% endif %}ok") == "ok"


FAULTS = {
    "ValueError": "{{ 'abc'.index('x') }}", "ZeroDivisionError": "{{ 1 // 0 }}", "TypeError": "{{ 1 + 'a' }}",
    "IndexError": "{{ 'abc'.format() }}{{ '{0}'.format() }}", "KeyError": "{{ {}.pop('x') }}",
    "RecursionError": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "raised": "{{ raise_exception('no') }}",
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_a_template_that_fails_refuses_the_record(kind):
    with pytest.raises(BadRecord, match="does not take it"):
        rendered(FAULTS[kind])


def test_a_template_that_fails_is_the_clients_mistake(server, monkeypatch):
    monkeypatch.setattr(server.service, "template", Template(FAULTS["ValueError"], "t"))
    for path in ("/v1/chat/completions", "/tokenize"):
        status, _, said = call(server, path, {"messages": CHAT})
        assert (status, error(said)["param"]) == (400, "messages")
        assert "substring not found" in error(said)["message"]


def test_a_template_may_be_given_as_text():
    found = find_template("{% for m in messages %}[{{ m.content }}]{% endfor %}", None)
    assert found is not None
    assert found.render([{"role": "user", "content": "a"}], prompt=False) == "[a]"
    with pytest.raises(UserError, match="no chat template"):
        find_template("nowhere.jinja", None)
