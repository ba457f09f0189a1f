"""Credentials never survive redaction; everything else does."""

import pickle
import string
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError, first_line
from components.core.secrets import (
    HIDDEN,
    Credentials,
    has_secret_query,
    is_secret_key,
    redact,
    redacted,
    split_url,
)

PASSWORDS = st.text(string.ascii_letters + string.digits + "!$%&*+,-.:;=_~@", min_size=3).map(
    lambda text: f"q{text}q"  # at least five characters that no other part of the text has
)
WORDS = st.text(string.ascii_lowercase + " .,:()[]", max_size=30)
SCHEMES = st.sampled_from(["http", "https", "postgresql", "postgresql+psycopg", "s3", "ray"])


@given(WORDS, SCHEMES, PASSWORDS, st.booleans(), WORDS)
def test_no_password_of_a_url_survives(before, scheme, password, is_quoted, after):
    secret = quote(password, safe="") if is_quoted else password
    text = f"{before} {scheme}://alice:{secret}@host.example:5000/path {after}"
    shown = redact(text, {})
    assert secret not in shown
    assert f"{scheme}://{HIDDEN}@host.example:5000/path" in shown
    assert redact(shown, {}) == shown


@given(WORDS, st.text(string.ascii_letters + string.digits + "/+=", min_size=12), WORDS)
def test_no_value_of_a_secret_variable_survives(before, value, after):
    environ = {"SERVICE_API_KEY": value, "HOME": "/root", "LANG": "C"}
    if value.isdecimal() or Path(value).exists():  # a number, or the name of a file
        return
    assert value not in redact(f"{before}{value}{after}", environ)
    assert redact("at /root in C", environ) == "at /root in C"


@pytest.mark.parametrize(
    "name",
    [
        "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN",
        "AWS_SESSION_TOKEN", "PGPASSWORD", "MYSQL_PWD", "RAY_AUTH_TOKEN", "api_key", "CREDENTIALS",
    ],
)  # fmt: skip
def test_names_that_say_secret(name):
    assert redact("it is hunter2x", {name: "hunter2x"}) == f"it is {HIDDEN}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PWD", "/tmp/storage"),
        ("OLDPWD", "/tmp/storage"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token"),
        ("RAY_AUTH_MODE", "token"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/passwd"),  # the name of a file, not its content
        ("SOME_TOKEN", "short"),
        ("NUM_TOKENS_KEY", "100000"),
    ],
)
def test_values_that_are_not_secret(name, value):
    assert redact(f"see {value}", {name: value}) == f"see {value}"


@pytest.mark.parametrize(
    "text",
    [
        "models:/certify-100k-l2-smoothed@candidate",
        "http://host:5000/models@champion",
        "sqlite:////tmp/a@b/mlflow.db",
        "train.epochs: 3 is too few; e.g. token_policy: drop",
        "https://host/x?page=3&order=name",
        "python:my_package.attacks:MyAttack",
    ],
)
def test_ordinary_text_stays(text):
    assert redact(text, {}) == text


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("https://b.s3.aws.com/x?X-Amz-Signature=0a1b2c&X-Amz-Expires=60", "0a1b2c"),
        ("https://a.blob.core.windows.net/x?sv=1&sig=Zm9v%3D", "Zm9v"),
        ("postgresql://host/db?user=me&password=hunter2", "hunter2"),
        ("host=h password=hunter2 user=me", "hunter2"),
        ("Authorization: Bearer abc.def", "abc.def"),
        ("alice:hunter2@10.0.0.5:6379 cannot be reached", "hunter2"),
        ("http:/alice:hunter2@host is a URL", "hunter2"),  # as a Path shows it
        ("https://ghp_abcdef@host/x", "ghp_abcdef"),
    ],
)
def test_other_forms(text, secret):
    assert secret not in redact(text, {})


def test_errors_carry_no_credential_and_survive_pickling():
    error = CasemateError("tracking.uri", "http://alice:hunter2@host", "is wrong: a:hunter2@b")
    for shown in (error, pickle.loads(pickle.dumps(error))):
        assert "hunter2" not in f"{shown} {shown.args} {shown.value} {shown.remedy}"
    assert "hunter2" not in first_line(ValueError("http://alice:hunter2@host"))
    path = CasemateError("storage", 3, "is a number")
    assert path.value == 3


def test_nested_values():
    values = {
        "a": ["http://u:hunter2@h"], "token": "hunter2", "num_tokens": 5, "class_token": True,
    }  # fmt: skip
    shown = redacted(values)
    assert shown == {
        "a": [f"http://{HIDDEN}@h"], "token": HIDDEN, "num_tokens": 5, "class_token": True,
    }  # fmt: skip


def test_keys_and_urls():
    assert all(map(is_secret_key, ["password", "token", "api_key", "hf_token", "SECRET"]))
    assert not any(map(is_secret_key, ["token_policy", "num_tokens", "keys", "kind", 3]))
    assert split_url("http://a:b%40c@h:1/p") == ("http://h:1/p", Credentials("a", "b@c"))
    assert split_url("http://h:1/p") == ("http://h:1/p", None)
    assert has_secret_query("s3://b?token=x")
    assert not has_secret_query("http://h?page=1")


def test_references_to_user_code_are_not_credentials():
    pinned = "attacks.kind: 'python:mine.py@0123456789abcdef:Attack' fails"
    assert redact(pinned) == pinned
    assert redact("python:hunter2@host.org") == "***@host.org"
