"""Tests of `trimcp.server.uri_template`: templates expanded as RFC 6570 says, and what an attacker may write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.server.expanding import expand
from tests.yardsticks import assert_costs
from trimcp.server.uri_template import UriTemplate

# RFC 6570, section 3.2.
VALUES: dict[str, Any] = {
    "count": ["one", "two", "three"],
    "dom": ["example", "com"],
    "dub": "me/too",
    "hello": "Hello World!",
    "half": "50%",
    "var": "value",
    "who": "fred",
    "base": "http://example.com/home/",
    "path": "/foo/bar",
    "list": ["red", "green", "blue"],
    "keys": {"semi": ";", "dot": ".", "comma": ","},
    "v": "6",
    "x": "1024",
    "y": "768",
    "empty": "",
    "empty_keys": {},
    "undef": None,
}
RFC_EXAMPLES = """
{count} one,two,three
{count*} one,two,three
{/count} /one,two,three
{/count*} /one/two/three
{;count} ;count=one,two,three
{;count*} ;count=one;count=two;count=three
{?count} ?count=one,two,three
{?count*} ?count=one&count=two&count=three
{&count*} &count=one&count=two&count=three
{var} value
{hello} Hello%20World%21
{half} 50%25
O{empty}X OX
O{undef}X OX
{x,y} 1024,768
{x,hello,y} 1024,Hello%20World%21,768
?{x,empty} ?1024,
?{x,undef} ?1024
?{undef,y} ?768
{var:3} val
{var:30} value
{list} red,green,blue
{list*} red,green,blue
{keys} semi,%3B,dot,.,comma,%2C
{keys*} semi=%3B,dot=.,comma=%2C
{+var} value
{+hello} Hello%20World!
{+half} 50%25
{base}index http%3A%2F%2Fexample.com%2Fhome%2Findex
{+base}index http://example.com/home/index
O{+empty}X OX
O{+undef}X OX
{+path}/here /foo/bar/here
here?ref={+path} here?ref=/foo/bar
up{+path}{var}/here up/foo/barvalue/here
{+x,hello,y} 1024,Hello%20World!,768
{+path,x}/here /foo/bar,1024/here
{+path:6}/here /foo/b/here
{+list} red,green,blue
{+list*} red,green,blue
{+keys} semi,;,dot,.,comma,,
{+keys*} semi=;,dot=.,comma=,
{#var} #value
{#hello} #Hello%20World!
{#half} #50%25
foo{#empty} foo#
foo{#undef} foo
{#x,hello,y} #1024,Hello%20World!,768
{#path,x}/here #/foo/bar,1024/here
{#path:6}/here #/foo/b/here
{#list} #red,green,blue
{#list*} #red,green,blue
{#keys} #semi,;,dot,.,comma,,
{#keys*} #semi=;,dot=.,comma=,
{.who} .fred
{.who,who} .fred.fred
{.half,who} .50%25.fred
www{.dom*} www.example.com
X{.var} X.value
X{.empty} X.
X{.undef} X
X{.var:3} X.val
X{.list} X.red,green,blue
X{.list*} X.red.green.blue
X{.keys} X.semi,%3B,dot,.,comma,%2C
X{.keys*} X.semi=%3B.dot=..comma=%2C
X{.empty_keys} X
X{.empty_keys*} X
{/who} /fred
{/who,who} /fred/fred
{/half,who} /50%25/fred
{/who,dub} /fred/me%2Ftoo
{/var} /value
{/var,empty} /value/
{/var,undef} /value
{/var,x}/here /value/1024/here
{/var:1,var} /v/value
{/list} /red,green,blue
{/list*} /red/green/blue
{/list*,path:4} /red/green/blue/%2Ffoo
{/keys} /semi,%3B,dot,.,comma,%2C
{/keys*} /semi=%3B/dot=./comma=%2C
{;who} ;who=fred
{;half} ;half=50%25
{;empty} ;empty
{;v,empty,who} ;v=6;empty;who=fred
{;v,bar,who} ;v=6;who=fred
{;x,y} ;x=1024;y=768
{;x,y,empty} ;x=1024;y=768;empty
{;x,y,undef} ;x=1024;y=768
{;hello:5} ;hello=Hello
{;list} ;list=red,green,blue
{;list*} ;list=red;list=green;list=blue
{;keys} ;keys=semi,%3B,dot,.,comma,%2C
{;keys*} ;semi=%3B;dot=.;comma=%2C
{?who} ?who=fred
{?half} ?half=50%25
{?x,y} ?x=1024&y=768
{?x,y,empty} ?x=1024&y=768&empty=
{?x,y,undef} ?x=1024&y=768
{?var:3} ?var=val
{?list} ?list=red,green,blue
{?list*} ?list=red&list=green&list=blue
{?keys} ?keys=semi,%3B,dot,.,comma,%2C
{?keys*} ?semi=%3B&dot=.&comma=%2C
{&who} &who=fred
{&half} &half=50%25
?fixed=yes{&x} ?fixed=yes&x=1024
{&x,y,empty} &x=1024&y=768&empty=
{&x,y,undef} &x=1024&y=768
{&var:3} &var=val
{&list} &list=red,green,blue
{&list*} &list=red&list=green&list=blue
{&keys} &keys=semi,%3B,dot,.,comma,%2C
{&keys*} &semi=%3B&dot=.&comma=%2C
"""


@pytest.mark.parametrize("line", RFC_EXAMPLES.strip().splitlines())
def test_rfc_examples_expand(line: str) -> None:
    template, expected = line.split(" ")
    assert expand(template, VALUES) == expected
    UriTemplate(template)


def test_triplets_and_literals_are_expanded() -> None:
    assert expand("{+u}", {"u": "a%2Fb%zz"}) == "a%2Fb%25zz"
    assert expand("Ü x/{n}", {"n": "ß"}) == "%C3%9C%20x/%C3%9F"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "}",
        "a{b",
        "a}b",
        "{}",
        "{a b}",
        "{{a}}",
        "{a:0}",
        "{a:x}",
        "{a:10000}",
        "{=a}",
        "{a**}",
        "{a,}",
        "{.}",
        "{a.}",
    ],
)
def test_bad_templates_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        UriTemplate(text)


def test_too_many_variables_are_refused() -> None:
    UriTemplate("/".join(f"{{v{i}}}" for i in range(64)))
    with pytest.raises(ValueError, match="64 variables"):
        UriTemplate("/".join(f"{{v{i}}}" for i in range(65)))


def test_variables_are_listed_once_in_order() -> None:
    template = UriTemplate("{/b:1,b}{?a*,c.d}")
    assert template.variables == ("b", "a", "c.d")
    assert repr(template) == "UriTemplate('{/b:1,b}{?a*,c.d}')"


@pytest.mark.parametrize(
    ("template", "uri", "expected"),
    [
        ("users://{id}", "users://42", {"id": "42"}),
        ("users://{id}", "users://", None),
        ("users://{id}", "users://a/b", None),
        ("users://{id}", "users://a?b", None),
        ("users://{id}", "users://a%20b", {"id": "a b"}),
        ("users://{id}", "users://a b", {"id": "a b"}),
        ("users://{id}", "users://ß", {"id": "ß"}),
        ("users://{id}", "others://42", None),
        ("plain://x", "plain://x", {}),
        ("plain://x", "plain://xy", None),
        ("plain://ü", "plain://ü", {}),
        ("plain://ü", "plain://%C3%BC", {}),
        ("r://{owner}/{repo}", "r://me/it", {"owner": "me", "repo": "it"}),
        ("{a}-{b}", "1-2-3", {"a": "1", "b": "2-3"}),
        ("{a}{b}", "xyz", {"a": "x", "b": "yz"}),
        ("{a}/{a}", "1/1", {"a": "1"}),
        ("{a}/{a}", "1/2", None),
        ("{a,b}", "1,2", {"a": "1", "b": "2"}),
        ("{a,b}", "1", {"a": "1"}),
        ("{a,b}", "1,2,3", {"a": "1", "b": "2,3"}),
        ("{a*}", "1,2", {"a": ["1", "2"]}),
        ("{a*,b}", "1,2,3", {"a": ["1", "2"], "b": "3"}),
        ("file:///{+path}", "file:///a/b.txt", {"path": "a/b.txt"}),
        ("file:///{+path}{?lines}", "file:///a/b?lines=3", {"path": "a/b", "lines": "3"}),
        ("file:///{+path}{?lines}", "file:///a/b", {"path": "a/b"}),
        ("{+dir}/{name}", "a/b/c", {"dir": "a/b", "name": "c"}),
        ("x{/a,b}", "x/1/2", {"a": "1", "b": "2"}),
        ("x{/a,b}", "x/1", {"a": "1"}),
        ("x{/a,b}", "x", {}),
        ("x{/a,b}", "x/1/2/3", None),
        ("x{/a*}", "x/1/2/3", {"a": ["1", "2", "3"]}),
        ("x{/a*}/end", "x/1/2/end", {"a": ["1", "2"]}),
        ("x{.ext}", "x.tar.gz", {"ext": "tar.gz"}),
        ("x{.ext*}", "x.tar.gz", {"ext": ["tar", "gz"]}),
        ("x{;a,b}", "x;b=2;a=1", {"a": "1", "b": "2"}),
        ("x{;a}", "x;a", {"a": ""}),
        ("x{?a,b}", "x?b=2&a=1", {"a": "1", "b": "2"}),
        ("x{?a,b}", "x?c=2", None),
        ("x{?a}", "x?a=1&a=2", None),
        ("x{?a*}", "x?a=1&a=2", {"a": ["1", "2"]}),
        ("x?f=1{&a}", "x?f=1&a=%26", {"a": "&"}),
        ("x{#a}", "x#top/1", {"a": "top/1"}),
        ("x/{a:1}/{a}", "x/v/value", {"a": "value"}),
        ("x/{a:1}/{a}", "x/w/value", None),
        ("x/{a:3}", "x/abc", {"a": "abc"}),
        ("x/{a:3}", "x/abcd", None),
        ("x/{a}", "x/%zz", None),
        ("x/{a}", "x/100%", None),
        ("x/{a}", "x/100%25", {"a": "100%"}),
        ("x/{a}", "x/%ff", None),
        ("x/{a}", "x/\ud800", None),
    ],
)
def test_reading_back(template: str, uri: str, expected: Any) -> None:
    assert UriTemplate(template).match(uri) == expected


@pytest.mark.parametrize(
    "value",
    [
        "..",
        "%2e%2e",
        "%252e%252e",
        "a%2Fb",
        "a%2fb",
        "a%252Fb",
        "a%25252Fb",
        "%2Fetc%2Fpasswd",
        "..%2Fx",
        "a%5Cb",
        "a\\b",
        "a%255cb",
        "a%00",
        "a%0Ab",
        "C:",
        "c%3Ax",
        "%25252525252525",
    ],
)
@pytest.mark.parametrize("template", ["x/{p}", "x{/p}", "x{/p*}", "x{.p}"])
def test_no_value_leaves_its_directory(template: str, value: str) -> None:
    uri = f"x.{value}" if "." in template else f"x/{value}"
    assert UriTemplate(template).match(uri) is None
    assert UriTemplate(template).match(uri, guard=False) is not None


@pytest.mark.parametrize(
    "value",
    [
        "..",
        "a/../b",
        "a/..",
        "../x",
        "%2e%2e/x",
        "a/%252e%252e/x",
        "/etc/passwd",
        "%2Fetc",
        "a\\b",
        "a%5Cb",
        "C:/x",
        "a%00",
    ],
)
@pytest.mark.parametrize("template", ["x={+p}", "x=#y{#p}", "x={?p}", "x={;p}"])
def test_no_path_leaves_its_directory(template: str, value: str) -> None:
    prefix = {"x={+p}": "x=", "x=#y{#p}": "x=#y#", "x={?p}": "x=?p=", "x={;p}": "x=;p="}[template]
    if template == "x={;p}" and "/" in value:
        value = value.replace("/", "%2F")
    assert UriTemplate(template).match(prefix + value) is None
    assert UriTemplate(template).match(prefix + value, guard=False) is not None


def test_exploded_paths_are_guarded_segment_by_segment() -> None:
    template = UriTemplate("x{/p*}")
    assert template.match("x/a/b") == {"p": ["a", "b"]}
    assert template.match("x/a/../b") is None
    assert template.match("x/a/..%2Fb") is None


@pytest.mark.parametrize("value", ["a..b", "...", ".hidden", "a.", "ab:y:z", "50% off", "a+b"])
def test_harmless_values_pass_the_guard(value: str) -> None:
    for text in ("x/{p}", "x/{+p}"):
        template = UriTemplate(text)
        assert template.match(expand(text, {"p": value})) == {"p": value}


@pytest.mark.parametrize("template", ["{a}" * 30, "{+a}" * 30, "{+a}a{+b}a{+c}a{+d}b", "x{/a*}" * 10, "{a}a" * 30])
def test_hostile_uris_take_linear_time(template: str) -> None:
    matcher = UriTemplate(template)

    def match(size: int) -> None:
        for uri in ("a" * 8 * size + "/", "a/" * 4 * size + "?", "x/a" * (5 * size // 2) + "#"):
            matcher.match(uri)

    assert_costs(lambda: match(1_000), at_most=2_000)
    assert_costs(lambda: match(1_000), at_most=16, times=lambda: match(250))


def test_long_uris_never_match() -> None:
    assert UriTemplate("{+a}").match("a" * 8_192) is not None
    assert UriTemplate("{+a}").match("a" * 8_193) is None


texts = st.text(min_size=1).filter(lambda text: not any(0xD800 <= ord(c) <= 0xDFFF for c in text))


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), texts))
def test_expanding_and_reading_back_are_inverse(values: dict[str, str]) -> None:
    template = UriTemplate("s://{a}/x{/b}{?c,d}")
    assume("a" in values)
    assert template.match(expand(template.text, values), guard=False) == values


@given(st.lists(texts, min_size=1), st.lists(texts, min_size=1), texts)
def test_lists_are_read_back(path: list[str], tags: list[str], name: str) -> None:
    template = UriTemplate("s://{name}{/path*}{?tags*}")
    values = {"name": name, "path": path, "tags": tags}
    assert template.match(expand(template.text, values), guard=False) == values


@given(st.text(), st.sampled_from(["{a}", "x{+a}{?b}", "{/a*}{.b}{#c}", "{;a,b}{&c*}", "{a:2}{a}"]))
def test_no_uri_makes_it_raise(uri: str, template: str) -> None:
    UriTemplate(template).match(uri)
