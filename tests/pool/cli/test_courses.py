"""``courses``: a teacher's way from nothing to a checked file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from gpu_pool.cli import main
from gpu_pool.courses import json_schema

GPU = ("--device", "V100-SXM2-32GB:1")
EXAMPLES = str(Path(__file__).parents[3] / "examples/courses")
BAD = "title: A\nslices: [{name: S, request: 2GB}]\nwieght: 2\n"


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(terminal, capsys):
    """Run a command in this process: what it does with files needs no other."""

    def run(*words):
        status = main(["courses", *words])
        return Done(status, *capsys.readouterr())

    return run


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "courses"
    found.mkdir()
    return found


def test_from_nothing_to_a_checked_file(terminal, folder):
    made = terminal.run("courses", "new", "cs101")
    assert (made.returncode, made.stderr) == (0, "")
    (folder / "cs101.yaml").write_text(made.stdout)
    done = terminal.run("courses", "check", str(folder), *GPU, "--students", "60")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{folder}/cs101.yaml: ok" in done.stdout
    [row] = [line.split() for line in done.stdout.splitlines() if line.startswith("Small (default)")]
    assert row == "Small (default) 5% 1 x V100-SXM2-32GB (simulated) 20 20 1638MiB 1288MiB".split()
    assert "If 60 come at once (each keeps Small for 1h; simulated): 20 (33%) have" in done.stdout
    assert "40 wait. Waits of all: median 1h, 95th percentile 2h, worst 2h." in done.stdout


def test_what_a_limit_means_is_said(run, folder):
    path = folder / "a.yaml"
    path.write_text("title: A\nslices: [{name: Elastic, request: 2%..10%}]\nquota: {share: 20%}\n")
    done = run("check", str(path), *GPU)
    assert done.returncode == 0
    [row] = [line for line in done.stdout.splitlines() if line.startswith("Elastic (default)")]
    assert row.split()[2] == "2%..10%"
    assert "10 by quota, of 50" in row
    assert "655MiB, up to 3276MiB" in row
    assert "Elastic: 2% is certain: that is what is counted" in done.stdout
    assert "Compute above 2% is not set aside." in done.stdout
    [plain] = json.loads(run("check", str(path), *GPU, "--json").stdout)["files"]
    assert plain["slices"][0]["fits"][0]["limit_mib"] == 3276


@pytest.mark.parametrize("verb", ["check", "list"])
def test_what_is_not_seen_in_a_file_or_its_name_is_written_out(run, folder, verb):
    unseen = [*map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))), *"\u200e\u200f\u061c\u200b\u2060"]
    for each in unseen:
        (folder / f"a{ord(each):x}.yaml").write_text(
            f"title: A\nslices: [{{name: S, request: 2%}}]\n# {each}weight: 9\n"
        )
        (folder / f"b{each}{ord(each):x}.yaml").write_text(f"title: 'A{each}'\n'{each}x': [{each}\n")
    done = run(verb, str(folder))
    assert not set(unseen) & set(done.stdout + done.stderr)
    if verb == "check":
        assert all(f"Remove it: # \\u{ord(each):04x}weight: 9" in done.stdout for each in unseen)


def test_a_time_without_a_unit_is_read_back_and_asked_for(run, folder):
    path = folder / "cs101.yaml"
    path.write_text("title: A\nslices: [{name: S, request: 2%}]\nlongest_lease: 90\nidle_limit: 1h30min\n")
    done = run("check", str(path), *GPU)
    assert done.returncode == 1
    assert f"{path}: can be used as it is, but is to be corrected" in done.stdout
    assert "line 3: longest_lease: '90' has no unit, and is read as 1 minute 30 seconds." in done.stdout
    assert "Write 90s, 90min or 90h." in done.stdout
    assert "longest_lease: 1 minute 30 seconds; idle_limit: 1 hour 30 minutes;" in done.stdout
    [plain] = json.loads(run("check", str(path), "--json").stdout)["files"]
    assert (plain["ok"], plain["problems"][0]["line"]) == (False, 3)
    assert {"field": "longest_lease", "words": "1 minute 30 seconds"} in plain["times"]
    path.write_text(path.read_text().replace("90\n", "90min\n"))
    done = run("check", str(path), *GPU)
    assert done.returncode == 0
    assert "Times: longest_lease: 1 hour 30 minutes; " in done.stdout
    assert (
        "yield_after: 1 minute (default); warn_before: 5 minutes (default); keep_at_most: 2 hours (default)."
        in done.stdout
    )


def test_an_offer_for_longer_than_the_longest_lease_is_told_by_line(run, folder):
    path = folder / "cs101.yaml"
    path.write_text("title: A\nslices:\n- {name: S, request: 2% for 6h}\nlongest_lease: 4h\n")
    done = run("check", str(path), *GPU)
    assert done.returncode == 1
    assert (
        "line 3: slices no. 1, request: '2% for 6h' is for longer than longest_lease (4 hours)" in done.stdout
    )
    assert "Write 2% for 4h, or a longer longest_lease." in done.stdout
    path.write_text(path.read_text().replace("6h", "4h"))
    assert run("check", str(path), *GPU).returncode == 0


def test_a_file_with_a_warning_is_a_course_all_the_same(run, folder):
    (folder / "cs101.yaml").write_text("title: A\nslices: [{name: S, request: 2%}]\nlongest_lease: 90\n")
    assert run("list", str(folder)).returncode == 0


def test_the_examples_pass(run):
    done = run("check", EXAMPLES, *GPU, "--students", "100")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(": ok\n") == 2


def test_a_bad_file_is_explained_and_the_good_ones_are_checked(run, folder):
    (folder / "bad.yaml").write_text(BAD)
    (folder / "good.yaml").write_text(run("new", "good").stdout)
    done = run("check", str(folder), *GPU)
    assert done.returncode == 1
    assert "bad.yaml, line 2: slices no. 1, request: '2GB' is not a GPU slice" in done.stdout
    assert "bad.yaml, line 3: there is no field 'wieght'. Did you mean weight?" in done.stdout
    assert "good.yaml: ok" in done.stdout


def test_as_json(run, folder):
    (folder / "bad.yaml").write_text(BAD)
    (folder / "good.yaml").write_text(run("new", "good").stdout)
    done = run("check", str(folder), *GPU, "--students", "5", "--json")
    assert done.returncode == 1
    printed = json.loads(done.stdout)
    bad, good = printed["files"]
    assert (printed["ok"], bad["ok"], good["ok"]) == (False, False, True)
    assert [(each["line"], each["field"]) for each in bad["problems"]] == [
        (2, "slices no. 1, request"),
        (3, ""),
    ]
    assert [(each["name"], each["at_once"], each["is_default"]) for each in good["slices"]] == [
        ("Small", 20, True),
        ("Large", 5, False),
    ]
    assert good["slices"][0]["fits"][0]["left_mib"] == 1288
    assert (good["rush"]["at_once"], good["rush"]["waits"]["worst"]) == (5, 0)


def test_a_slice_that_fits_nowhere_fails_where_the_gpus_were_named(run, folder):
    (folder / "a.yaml").write_text("title: A\nslices: [{name: Huge, request: 40GiB}]\n")
    named = run("check", f"{folder}/a.yaml", *GPU, "--students", "5")
    assert named.returncode == 1
    assert "Huge fits on no GPU here." in named.stdout
    assert f"{folder}/a.yaml: no error, but not every slice can be granted\n" in named.stdout
    assert ": ok" not in named.stdout
    plain = json.loads(run("check", f"{folder}/a.yaml", *GPU, "--json").stdout)
    assert (plain["ok"], plain["files"][0]["ok"], plain["files"][0]["problems"]) == (False, False, [])
    # What this machine happens to have says little about the pool's GPUs.
    found = run("check", f"{folder}/a.yaml")
    assert (found.returncode, "a.yaml: ok" in found.stdout) == (0, False)


def test_what_nobody_can_have_is_said(run, folder):
    text = "title: A\nslices: [{name: Big, request: 50%}]\nper_user: {share: 10%}\nquota: {share: 20%}\n"
    (folder / "a.yaml").write_text(text)
    done = run("check", f"{folder}/a.yaml", *GPU, "--students", "5")
    assert "a.yaml: ok" not in done.stdout
    assert "Nobody can have Big: it is more than per_user allows." in done.stdout
    assert "Nobody can have Big: it is more than the quota allows." in done.stdout
    assert "5 are refused by a quota." in done.stdout


def test_courses_are_listed(run, folder):
    always = "title: Always\nslices: [{name: S, request: 2%}, {name: L, request: 1}]\n"
    over = "weeks: {from: 2020-01-01, to: 2020-02-01}\nhours: Mon 10:00-12:00\ntime_zone: UTC\n"
    (folder / "always.yaml").write_text(always)
    (folder / "over.yaml").write_text(always.replace("Always", "Over") + over)
    (folder / "bad.yaml").write_text(BAD)
    done = run("list", str(folder))
    assert done.returncode == 1
    heads, *rows = [line.split("  ") for line in done.stdout.splitlines()]
    cells = {row[0]: [cell.strip() for cell in row if cell.strip()] for row in rows}
    assert [head.strip() for head in heads if head.strip()] == ["Course", "Title", "Open", "Now", "Slices"]
    assert cells["always"][1:] == ["Always", "always", "open", "S 2%, L 1"]
    assert cells["over"][2:4] == ["2020-01-01 to 2020-02-01, Mon 10:00-12:00 (UTC)", "over"]
    assert cells["bad"][1] == "cannot be used"
    printed = json.loads(run("list", str(folder), "--json").stdout)
    assert [(each["course"], each["ok"], each.get("open")) for each in printed["courses"]] == [
        ("always", True, True),
        ("bad", False, None),
        ("over", True, False),
    ]


def test_without_a_name_the_folder_of_the_settings_is_meant(run, folder, tmp_path):
    assert run("list").returncode == 2
    (folder / "ml101.yaml").write_text(run("new", "ml101").stdout)
    config = tmp_path / "config/gpu_pool_config.py"
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"c.PoolSettings.courses_dir = {str(folder)!r}\n")
    assert run("list").stdout.splitlines()[1].startswith("ml101")
    config.write_text(
        f"c.PoolSettings.courses_dir = {str(folder)!r}\nc.PoolSettings.courses = {{'ml101': {{}}}}\n"
    )
    done = run("check")
    assert done.returncode == 1
    assert "ml101.yaml: the course 'ml101' is also in c.PoolSettings.courses." in done.stdout


def test_the_schema_is_printed(run):
    assert json.loads(run("schema").stdout) == json_schema()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["new", "CS 101"], "For example, name it cs-101.yaml"),
        (["check", "nowhere.yaml"], "cannot be read: No such file"),
        (["check", "--students", "0"], "--students"),
        (["check", EXAMPLES, "--stay", "long"], "not a duration"),
        (["check", EXAMPLES, "--device", "V100"], "'V100' in --device does not name simulated devices"),
        (["check", EXAMPLES, "--device", "junk:1"], "'junk:1' in --device does not name simulated devices"),
    ],
)
def test_what_it_refuses(run, words, said):
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_the_images_of_courses_are_printed_for_the_chart_that_fetches_them(run, folder):
    (folder / "ml.yaml").write_text(
        "title: ML\nwho: {users: [ada]}\nslices: [{name: Small, request: 2%}]\n"
        "kubernetes: {image: 'registry:5000/ml:1'}\n"
    )
    done = run("export", "--images", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    (image,) = yaml.safe_load(done.stdout)["prePuller"]["extraImages"].values()
    assert image == {"name": "registry:5000/ml", "tag": "1"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "No export was requested. Accepted: --kubernetes, or --images."),
        (("--images", "--kubernetes"), "Both exports were requested. Accepted: --kubernetes, or --images."),
        (("--images",), "No course names an image."),
    ],
)
def test_what_cannot_be_exported_is_told(run, folder, words, told):
    (folder / "ml.yaml").write_text("title: ML\nslices: [{name: Small, request: 2%}]\n")
    done = run("export", *words, str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    assert told in " ".join(done.stderr.split())
