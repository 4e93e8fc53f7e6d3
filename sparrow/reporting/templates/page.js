"use strict";
// The page works without this script: it adds the theme button and the tooltips.
(() => {
  const root = document.documentElement;
  const button = document.querySelector(".toggle");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => { button.lastElementChild.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  name();
  button.hidden = false;

  const create = (tag, text, role) => {
    const element = document.createElement(tag);
    if (text) element.textContent = text;
    if (role) element.className = role;
    return element;
  };
  const draw = (svg, tag, className) => {
    const element = document.createElementNS(svg.namespaceURI, tag);
    element.setAttribute("class", className);
    element.setAttribute("visibility", "hidden");
    return svg.appendChild(element);
  };
  // The last point at or before x of a line of steps, else the point at x.
  const pointAt = (line, x) => {
    const held = line.points.filter((point) => (line.holds ? point[0] <= x : point[0] === x));
    return held[held.length - 1];
  };

  for (const plot of document.querySelectorAll(".plot")) {
    const data = plot.querySelector("script");
    if (!data) continue;
    const { lines, box: [left, top, right, bottom] } = JSON.parse(data.textContent);
    const svg = plot.querySelector("svg");
    const title = svg.querySelector("title");
    svg.setAttribute("aria-label", title.textContent); // the browser's own tip would cover ours
    svg.removeAttribute("aria-labelledby");
    title.remove();
    const tip = plot.appendChild(create("div", "", "tip"));
    const cross = draw(svg, "line", "cross");
    const pins = lines.map((line) => draw(svg, "circle", `pin ${line.role}`));
    const all = lines.flatMap((line) => line.points);
    const hide = () => {
      tip.hidden = true;
      for (const mark of [cross, ...pins]) mark.setAttribute("visibility", "hidden");
    };
    const show = (event) => {
      const frame = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / frame.width;
      const at = (event.clientX - frame.left) * scale;
      const height = (event.clientY - frame.top) * scale;
      if (at < left - 12 || at > right + 12 || height > bottom + 30) return hide();
      const near = all.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
      tip.replaceChildren(create("b", near[2]));
      for (const [end, y] of [["1", top], ["2", bottom]]) {
        cross.setAttribute(`x${end}`, near[0]);
        cross.setAttribute(`y${end}`, y);
      }
      lines.forEach((line, i) => {
        const point = pointAt(line, near[0]);
        pins[i].setAttribute("visibility", point && !line.faint ? "visible" : "hidden");
        if (!point) return;
        for (const [key, value] of [["cx", near[0]], ["cy", point[1]], ["r", 4]]) {
          pins[i].setAttribute(key, value);
        }
        const row = tip.appendChild(create("span", "", line.role));
        row.append(create("i"), create("u", line.name), create("em", point[3]));
      });
      cross.setAttribute("visibility", "visible");
      tip.hidden = false;
      const x = near[0] / scale;
      const room = plot.clientWidth - tip.offsetWidth;
      const side = x + 14 > room ? x - tip.offsetWidth - 14 : x + 14;
      tip.style.left = `${Math.max(0, Math.min(room, side))}px`;
      tip.style.top = `${top / scale}px`;
    };
    hide();
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") hide(); // a finger that was lifted leaves its values
    });
    document.addEventListener("pointerdown", (event) => {
      if (!plot.contains(event.target)) hide();
    });
  }
})();
