"""What a chat template expects, read off its syntax tree: no template says so in any other way."""

from __future__ import annotations

from functools import lru_cache

import jinja2
from jinja2 import nodes

from octavo.frontend.text.messages import ContentFormat
from octavo.frontend.text.template_sandbox import parse_template


def check_template(source: str) -> str | None:
    """What is wrong with the syntax of a template, or None."""
    try:
        parse_template(source)
    except jinja2.TemplateSyntaxError as e:
        return f"{e.message} (line {e.lineno})"
    except RecursionError:
        return "it is nested too deep"
    return None


@lru_cache(maxsize=32)
def content_format(source: str) -> ContentFormat:
    """How a template wants the content of messages: a string unless it loops over the parts.

    A template that loops over parts but also asks whether the content is a string takes both as they are.
    """
    tree = parse_template(source)
    names = {"content"} if any("content" in _parameters(macro) for macro in tree.find_all(nodes.Macro)) else set[str]()
    while True:  # names that stand for a content, through any number of {% set %} and macro calls
        found = {a.target.name for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name) and _is_content(a.node, names)}
        for macro in tree.find_all(nodes.Macro):
            for call in tree.find_all(nodes.Call):
                if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                    found |= {p for p, arg in zip(_parameters(macro), call.args, strict=False) if _is_content(arg, names)}
        if found <= names:
            break
        names |= found
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return "string"
    asks = any(test.name == "string" and _is_content(test.node, names) for test in tree.find_all(nodes.Test))
    return "as given" if asks else "openai"


def _parameters(macro: nodes.Macro) -> list[str]:
    return [arg.name for arg in macro.args]


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """`node` is message.content, message['content'], or a name that stands for it; filters and slices on top do not matter."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in names


@lru_cache(maxsize=32)
def reads_arguments_as_text(source: str) -> bool:
    """Whether a template writes the arguments of tool calls out as they are, and so needs JSON text.

    Most turn them into JSON themselves, or loop over them, and need the object.
    """
    tree = parse_template(source)
    uses = [n for n in tree.find_all((nodes.Getattr, nodes.Getitem)) if _names_arguments(n)]
    joined = {id(child) for n in tree.find_all((nodes.Add, nodes.Concat, nodes.Output)) for child in n.iter_child_nodes()}
    return bool(uses) and all(id(use) in joined for use in uses)


def _names_arguments(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "arguments"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"


@lru_cache(maxsize=32)
def knows_tools(source: str) -> bool:
    """Whether a template looks at the tools of a request at all."""
    return any(name.name == "tools" for name in parse_template(source).find_all(nodes.Name))
