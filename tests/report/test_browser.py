"""The report in a real headless Chromium: pictures and controls by mouse and keyboard, narrow and dark, and nothing leaves it."""

import io
import shutil
from pathlib import Path

import pytest
from PIL import Image
from support.fake_run import AFTER, BEFORE, PROMPTS, synthetic_run

from flow_grpo.report import page as report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
HOSTILE = "<img src=https://example.org/x.png onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run = synthetic_run(folder / "run", prompts=[*PROMPTS[:2], HOSTILE, *PROMPTS[3:]], warning="clip has fallen")
    return report.write([run], folder / "report.html")


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    runs = [synthetic_run(folder / "first"), synthetic_run(folder / "second", prompts=PROMPTS[::-1], steps=20)]
    return report.write(runs, folder / "report.html")


@pytest.fixture
def open_page(browser):
    """Opens a report; in the end there was no error on its console, no dialog, and no request but for the file itself."""
    troubles, contexts = [], []

    def opened(file: Path, width: int = 1280, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append("dialog"), dialog.dismiss()))
        page.on("request", lambda r: r.url.startswith(("data:", file.as_uri())) or troubles.append(r.url))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def color_at(page, selector: str, share: float) -> tuple[int, int, int]:
    """The colour of a picture, near its lower edge, at that share of its width."""
    image = Image.open(io.BytesIO(page.locator(selector).screenshot())).convert("RGB")
    return image.getpixel((int(share * image.width), image.height - 20))


def near(color: tuple[int, int, int], wanted: tuple[int, int, int]) -> bool:
    return all(abs(a - b) < 12 for a, b in zip(color, wanted, strict=True))


def test_the_slider_moves_by_mouse_and_keyboard(open_page, file):
    page = open_page(file)
    assert near(color_at(page, "#compare .picture", 0.3), BEFORE)
    assert near(color_at(page, "#compare .picture", 0.7), AFTER)
    box = page.locator("#compare .picture").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.15 * box["width"], box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    assert near(color_at(page, "#compare .picture", 0.3), AFTER)
    slider = page.get_by_role("slider", name="Before and after training")
    slider.focus()
    page.keyboard.press("End")
    assert near(color_at(page, "#compare .picture", 0.9), BEFORE)
    page.keyboard.press("ArrowLeft")
    assert slider.get_attribute("aria-valuetext") == "99 percent before, 1 percent after training"


def test_missing_images_are_mentioned_only_where_no_before_and_after_is_shown(open_page, tmp_path):
    for evaluations, name in enumerate(("none", "one", "two")):
        run = synthetic_run(tmp_path / name, steps=20, last=10 * max(0, evaluations - 1), pictures=evaluations > 0)
        page = open_page(report.write([run], tmp_path / f"{name}.html"))
        assert page.locator("#no-pictures").is_visible() == (evaluations < 2), name
        assert page.locator("#compare").is_visible() == (evaluations == 2), name


def test_another_prompt_is_chosen_by_mouse_and_arrow_keys(open_page, file):
    page = open_page(file)
    assert PROMPTS[0] in page.locator("#prompt").inner_text()
    page.locator("#thumbs label").nth(3).click()
    assert PROMPTS[3] in page.locator("#prompt").inner_text()
    page.keyboard.press("ArrowLeft")
    assert HOSTILE in page.locator("#prompt").inner_text(), "as text"
    assert page.locator("#compare .after").get_attribute("alt").endswith(HOSTILE)
    assert page.locator("#film-prompt").input_value() == "2"


def test_the_film_is_scrubbed_and_plays(open_page, file):
    page = open_page(file)
    scrub = page.get_by_role("slider", name="Evaluation", exact=True)
    assert page.locator("#frame-text").inner_text().startswith("Step 40")
    assert near(color_at(page, "#film .picture", 0.5), AFTER)
    scrub.focus()
    page.keyboard.press("Home")
    assert page.locator("#frame-text").inner_text().startswith("Step 0")
    assert near(color_at(page, "#film .picture", 0.5), BEFORE)
    page.keyboard.press("ArrowRight")
    assert scrub.get_attribute("aria-valuetext") == "step 10, ocr 0.525"
    page.locator("#strip img").nth(2).click()
    assert page.locator("#frame-text").inner_text().startswith("Step 20")
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Pause").wait_for()
    page.get_by_role("button", name="Play").wait_for(timeout=5000)
    assert page.locator("#frame-text").inner_text().startswith("Step 40"), "it stops at the end"


def values(page, place: int = 0) -> list[str]:
    return page.locator(".group").nth(place).locator(".numbers > span").all_inner_texts()


def test_groups_are_sorted_with_each_advantage_under_its_image(open_page, file):
    page = open_page(file)
    assert page.locator(".group").count() == 2
    assert values(page) == ["0.900", "0.800", "0.500", "0.200"]
    assert page.locator(".group").nth(0).locator("b").all_inner_texts() == ["+0.30", "+0.20", "−0.10", "−0.40"]
    alt = page.locator(".group img").first.get_attribute("alt")
    assert alt == "reward 0.900, advantage +0.30"
    page.get_by_label("Sorted by").select_option("as sampled")
    assert values(page) == ["0.200", "0.900", "0.500", "0.800"]
    page.get_by_label("Sorted by").select_option("clip")
    assert values(page) == ["0.500", "0.200", "0.900", "0.800"]
    page.get_by_label("Training step").select_option("20")
    assert page.locator(".group").count() == 2


def test_the_curves_are_read_by_pointer_and_arrow_keys(open_page, file):
    page = open_page(file)
    plot = page.locator(".lead .plot")
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert "step 1:" in page.locator(".lead output").inner_text()
    page.keyboard.press("End")
    assert "held out 0.695" in plot.get_attribute("aria-valuetext")
    plot.hover(position={"x": 0.5 * plot.bounding_box()["width"], "y": 40})
    assert page.locator(".lead output").inner_text().startswith("step 20:")
    page.mouse.move(0, 0)
    assert page.locator(".lead output").inner_text() == ""
    clip = page.locator(".chart", has_text="High-frequency power").locator("svg path")
    assert clip.first.bounding_box()["width"] > 150, "the line spans the chart"


def test_several_runs_take_turns_in_the_images(open_page, two):
    page = open_page(two)
    assert PROMPTS[0] in page.locator("#prompt").inner_text()
    page.get_by_text("second", exact=True).first.click()
    page.locator("#runs").get_by_text("second").click()
    assert PROMPTS[-1] in page.locator("#prompt").inner_text()
    assert page.locator("#group-step option").all_inner_texts() == ["1", "10", "20"]
    assert page.locator("#evaluations [data-run]:visible").count() == 1
    page.keyboard.press("ArrowLeft")
    assert PROMPTS[0] in page.locator("#prompt").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_and_every_control_has_a_name_and_a_visible_focus(open_page, file, two, width, scheme):
    for one in (file, two):
        page = open_page(one, width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, paper[4:-1].split(","))) < 150) == (scheme == "dark")
        first = page.locator("#compare .picture").bounding_box()
        assert first["y"] + first["height"] < 800, "the pictures are on the first screen"
        controls = page.locator("input:visible, select:visible, button:visible, [tabindex='0']:visible")
        assert controls.count() > 10
        for control in controls.all():
            name = control.evaluate(
                "e => e.ariaLabel || [...(e.labels ?? [])].map(l => l.innerText || l.title).join() || e.innerText"
            )
            assert name.strip(), control.evaluate("e => e.outerHTML.slice(0, 200)")
        seen = set()
        for _ in range(30):
            page.keyboard.press("Tab")
            visible, name = page.evaluate(FOCUS)
            if name.startswith("<body"):
                break  # the page is over
            assert visible, name
            seen.add(name)
        assert len(seen) > 12, "the keyboard gets around"


# whether what has the focus, or what stands for it, is outlined
FOCUS = """() => {
  const focused = document.activeElement;
  const near = [focused, focused.nextElementSibling, focused.parentElement].filter(Boolean);
  const drawn = near.some((e) => getComputedStyle(e).outlineStyle !== "none" && getComputedStyle(e).outlineWidth !== "0px");
  return [drawn, focused.outerHTML.slice(0, 120)];
}"""


def test_text_can_be_read_on_its_ground(open_page, file):
    """WCAG's contrast of 4.5 for text, in both schemes."""
    for scheme in ("light", "dark"):
        page = open_page(file, scheme=scheme)
        colors = page.evaluate(
            "() => ['--paper', '--wash', '--ink', '--soft', '--accent', '--on-accent'].map(n => {"
            "document.body.style.outlineColor = `var(${n})`; return getComputedStyle(document.body).outlineColor })"
        )
        paper, wash, ink, soft, accent, on_accent = (luminance(color) for color in colors)
        for text, ground in ((ink, paper), (soft, paper), (accent, paper), (ink, wash), (on_accent, accent)):
            light, dark = max(text, ground), min(text, ground)
            assert (light + 0.05) / (dark + 0.05) >= 4.5


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in color[4:-1].split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
