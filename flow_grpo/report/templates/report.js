"use strict";
// Images and controls of the report. Text of a run is set as text, never as HTML.
(() => {
  const { runs } = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const make = (tag, props = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...children);
    return node;
  };
  const format = (value, digits = 3) =>
    value === null ? "–" : value.toFixed(Math.abs(value) < 100 ? digits : 0).replace("-", "−");
  const signed = (value) => (value > 0 ? "+" : "") + format(value, 2);

  let run = runs[0];
  let prompt = 0;
  let frame = 0;

  // -- before and after ----------------------------------------------------------------------------------------------
  const slider = document.querySelector("[data-slider]");
  const range = slider.querySelector("input");

  function split() {
    slider.style.setProperty("--split", `${range.value}%`);
    range.setAttribute("aria-valuetext", `${range.value} percent before, ${100 - range.value} percent after training`);
    slider.querySelector(".left").style.opacity = range.value < 12 ? 0 : 1;
    slider.querySelector(".right").style.opacity = range.value > 88 ? 0 : 1;
  }
  range.addEventListener("input", split);

  function showPrompt() {
    const text = run.prompts[prompt];
    const [first, last] = [run.frames[0], run.frames.at(-1)];
    for (const [name, shown] of [["before", first], ["after", last]]) {
      const image = slider.querySelector(`.${name}`);
      image.src = shown.pictures[prompt];
      image.alt = `${name} training, step ${shown.step}: ${text}`;
    }
    const values = ` ${run.measure} ${format(first.values[prompt])} → ${format(last.values[prompt])}`;
    const source = run.sources[prompt] ? [make("img", { className: "source", src: run.sources[prompt], alt: "the image of the prompt" })] : [];
    const strips = [["Before", first], ["After", last]].filter(([, shown]) => shown.strips[prompt]).map(([name, shown]) =>
      make("figure", {}, make("img", { src: shown.strips[prompt], alt: `frames of the video at step ${shown.step}` }), make("figcaption", { textContent: name })));
    find("frames").replaceChildren(...strips);
    find("prompt").replaceChildren(...source, make("bdi", { textContent: text }), make("span", { className: "figure", textContent: values }));
    find("film-prompt").value = prompt;
    for (const input of find("thumbs").querySelectorAll("input")) input.checked = Number(input.value) === prompt;
    strip();
    showFrame();
  }

  // -- the film ------------------------------------------------------------------------------------------------------
  function strip() {
    const images = run.frames.map((shown, i) => {
      const image = make("img", { src: shown.pictures[prompt], alt: "" });
      image.addEventListener("click", () => showFrameAt(i));
      return image;
    });
    find("strip").replaceChildren(...images);
  }

  function showFrame() {
    const now = run.frames[frame];
    find("frame").src = now.pictures[prompt];
    find("frame").alt = `step ${now.step}: ${run.prompts[prompt]}`;
    find("frame-text").replaceChildren(make("b", { textContent: `Step ${now.step}` }), ` ${run.measure} ${format(now.values[prompt])}`);
    find("scrub").value = frame;
    find("scrub").setAttribute("aria-valuetext", `step ${now.step}, ${run.measure} ${format(now.values[prompt])}`);
    [...find("strip").children].forEach((image, i) => image.classList.toggle("now", i === frame));
  }

  function showFrameAt(index) {
    frame = index;
    showFrame();
  }

  let playing = null;
  function play(start) {
    clearInterval(playing);
    playing = start ? setInterval(() => (frame < run.frames.length - 1 ? showFrameAt(frame + 1) : play(false)), 600) : null;
    find("play").textContent = start ? "Pause" : "Play";
    find("play").setAttribute("aria-pressed", String(start));
  }
  find("play").addEventListener("click", () => {
    if (playing === null && frame === run.frames.length - 1) showFrameAt(0);
    play(playing === null);
  });
  find("scrub").addEventListener("input", () => showFrameAt(Number(find("scrub").value)));
  find("film-prompt").addEventListener("change", () => showPromptAt(Number(find("film-prompt").value)));

  function showPromptAt(index) {
    prompt = index;
    showPrompt();
  }

  function showPictures() {
    const hasImages = run.frames.length > 0 && run.prompts.length > 0;
    find("compare").hidden = !(hasImages && run.frames.length > 1);
    find("film").hidden = !(hasImages && run.frames.length > 1);
    find("no-pictures")?.toggleAttribute("hidden", hasImages && run.frames.length > 1); // it is in the page only if a run has none
    play(false);
    if (find("compare").hidden) return;
    const [width, height] = run.size;
    document.body.style.setProperty("--aspect", width / height);
    document.body.classList.toggle("blocks", width < 160);
    const thumbs = run.prompts.map((text, i) => {
      const input = make("input", { type: "radio", name: "prompt", value: i });
      input.addEventListener("change", () => showPromptAt(i));
      return make("label", { title: text }, input, make("img", { src: run.frames.at(-1).pictures[i], alt: text }));
    });
    find("thumbs").querySelector(".row")?.remove();
    find("thumbs").append(make("div", { className: "row" }, ...thumbs));
    find("film-prompt").replaceChildren(...run.prompts.map((text, i) => make("option", { value: i, textContent: text })));
    find("scrub").max = run.frames.length - 1;
    const changes = run.prompts.map((_, i) => Math.round(1e4 * Math.abs(run.frames.at(-1).values[i] - run.frames[0].values[i])));
    prompt = changes.indexOf(Math.max(...changes)); // the largest change
    frame = run.frames.length - 1;
    showPrompt();
  }

  // -- groups --------------------------------------------------------------------------------------------------------
  const AS_SAMPLED = "as sampled";

  function sorted(items, key) {
    const value = (item) => (key === "reward" ? item.reward : item.rewards[key]);
    return key === AS_SAMPLED ? items : [...items].sort((a, b) => value(b) - value(a));
  }

  function groupImage(item, largest) {
    const share = largest ? (50 * Math.abs(item.advantage)) / largest : 0;
    const bar = make("i", { className: item.advantage < 0 ? "down" : "up" });
    bar.style.cssText = `${item.advantage < 0 ? "right" : "left"}:50%;width:${share}%`;
    const names = Object.entries(item.rewards).map(([name, value]) => `${name} ${format(value)}`);
    const numbers = make(
      "span",
      { className: "numbers" },
      make("span", { textContent: format(item.reward), title: names.join(", ") }),
      make("b", { textContent: signed(item.advantage) }),
    );
    const label = `reward ${format(item.reward)}, advantage ${signed(item.advantage)}`;
    return make("li", {}, make("img", { src: item.picture ?? "", alt: label }), numbers, make("span", { className: "bar" }, bar));
  }

  function showGroups() {
    const step = run.groups[Number(find("group-step").value)];
    const key = find("group-sort").value;
    const largest = Math.max(...step.groups.flatMap((group) => group.items.map((item) => Math.abs(item.advantage))));
    const shown = step.groups.map((group) => {
      const count = group.images > group.items.length ? `${group.items.length} of ${group.images} images` : "";
      const source = group.source ? [make("img", { className: "source", src: group.source, alt: "the image of the prompt" })] : [];
      const title = make("h3", {}, ...source, make("bdi", { textContent: group.prompt }), make("small", { textContent: count }));
      const list = make("ol", {}, ...sorted(group.items, key).map((item) => groupImage(item, largest)));
      for (const bar of list.querySelectorAll(".bar")) bar.style.display = "block";
      return make("div", { className: "group" }, title, list);
    });
    find("group-list").replaceChildren(...shown);
    find("group-status").textContent = key === AS_SAMPLED ? "in the order of sampling" : "highest first";
  }

  function showGroupChoices() {
    const hasGroups = run.groups.some((step) => step.groups.length > 0);
    find("groups-body").hidden = !hasGroups;
    find("no-groups")?.toggleAttribute("hidden", hasGroups);
    if (!hasGroups) return;
    find("group-step").replaceChildren(...run.groups.map((step, i) => make("option", { value: i, textContent: step.step })));
    const names = Object.keys(run.groups[0].groups[0]?.items[0]?.rewards ?? {});
    const keys = ["reward", ...(names.length > 1 ? names : []), AS_SAMPLED];
    find("group-sort").replaceChildren(...keys.map((key) => make("option", { value: key, textContent: key })));
    showGroups();
  }
  find("group-step").addEventListener("change", showGroups);
  find("group-sort").addEventListener("change", showGroups);

  // -- curves: their values at the pointer or the arrow keys -----------------------------------------------
  for (const plot of document.querySelectorAll(".plot")) {
    const lines = JSON.parse(plot.dataset.points).filter((line) => line.points.length > 0);
    const steps = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
    const last = Number(plot.getAttribute("aria-valuemax"));
    const cursor = plot.querySelector(".cursor");
    const output = plot.parentElement.querySelector("output");
    let index = steps.length - 1;

    const read = (wanted) => {
      index = Math.max(0, Math.min(steps.length - 1, wanted));
      const step = steps[index];
      const values = lines.map(({ label, points }) => {
        const near = points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
        return `${label} ${format(near[1])}`;
      });
      const text = `step ${Math.round(step)}: ${values.join(", ")}`;
      cursor.hidden = false;
      cursor.style.left = `${(100 * step) / last}%`;
      output.textContent = text;
      plot.setAttribute("aria-valuenow", Math.round(step));
      plot.setAttribute("aria-valuetext", text);
    };
    const leave = () => {
      cursor.hidden = true;
      output.textContent = "";
    };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * last;
      read(steps.reduce((best, step, i) => (Math.abs(step - x) < Math.abs(steps[best] - x) ? i : best), 0));
    });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: steps.length - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      read(moves[event.key]);
    });
  }

  // -- which run -----------------------------------------------------------------------------------------------------
  function showRun(index) {
    run = runs[index];
    for (const part of document.querySelectorAll("[data-run]")) part.hidden = Number(part.dataset.run) !== index;
    showPictures();
    showGroupChoices();
  }
  for (const input of document.querySelectorAll("#runs input")) input.addEventListener("change", () => showRun(Number(input.value)));
  split();
  showRun(0);
})();
