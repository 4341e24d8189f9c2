// What a person would see to be wrong with a page. `measure()` returns a list of sentences.
(() => {
  const visible = (one) => one.checkVisibility() && !one.closest(".hidden");
  const short = (one) => `${one.tagName.toLowerCase()}${one.id ? `#${one.id}` : ""} "${one.textContent.slice(0, 40)}"`;
  const rgb = (text) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([red, green, blue]) =>
    [red, green, blue].map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
      .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const contrast = (one, other) => {
    const [dark, bright] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  function ground(one) {
    for (let at = one; at; at = at.parentElement) {
      const found = rgb(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  }
  function texts() {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
      const node = walker.currentNode;
      const parent = node.parentElement;
      if (!node.data.trim() || !visible(parent) || parent.closest("title, option")) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      found.push([parent, range.getBoundingClientRect()]);
    }
    return found;
  }
  window.measure = () => {
    const wrong = [];
    const wide = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth > wide) wrong.push(`the page is ${document.documentElement.scrollWidth} wide in ${wide}`);
    for (const one of document.querySelectorAll("body *")) {
      if (!visible(one) || one.closest("svg") || ["TEXTAREA", "SELECT", "PROGRESS"].includes(one.tagName)) continue;
      if (one.clientWidth && one.scrollWidth > one.clientWidth + 1) wrong.push(`cut or scrolled: ${short(one)}`);
    }
    const found = texts();
    for (const [parent, box] of found) {
      if (box.left < -1 || box.right > wide + 1) wrong.push(`beside the page: ${short(parent)}`);
      const svg = parent.closest("svg");
      if (svg) {
        const around = svg.getBoundingClientRect();
        if (box.left < around.left - 1 || box.right > around.right + 1 || box.bottom > around.bottom + 2) wrong.push(`beside its picture: ${short(parent)}`);
        if (parent.textContent.endsWith("…")) wrong.push(`shortened: ${short(parent)}`);
      }
      const style = getComputedStyle(parent);
      const ink = rgb(svg ? style.fill : style.color);
      const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 600);
      const grounds = svg ? ["--card", "--field"].map((name) => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.cssText = `background: var(${name})`;
        const color = rgb(getComputedStyle(probe).backgroundColor);
        probe.remove();
        return color;
      }) : [ground(parent)];
      const least = Math.min(...grounds.map((one) => contrast(ink, one)));
      if (least < (large ? 3 : 4.5) && !parent.closest(":disabled")) wrong.push(`contrast ${least.toFixed(2)}: ${short(parent)}`);
    }
    const drawn = found.filter(([parent]) => parent.closest("svg"));
    drawn.forEach(([one, box], at) => {
      for (const [other, beside] of drawn.slice(at + 1)) {
        const apart = box.right <= beside.left + 1 || beside.right <= box.left + 1 || box.bottom <= beside.top + 3 || beside.bottom <= box.top + 3;
        if (!apart && one.closest("svg") === other.closest("svg")) wrong.push(`over each other: ${short(one)} and ${short(other)}`);
      }
    });
    return wrong;
  };
  window.onFirstScreen = (selector) => {
    const box = document.querySelector(selector).getBoundingClientRect();
    return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight;
  };
  window.reds = () => {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.cssText = "color: var(--bad)";
    const bad = rgb(getComputedStyle(probe).color).join();
    probe.remove();
    const colors = (one) => {
      const [style, mark] = [getComputedStyle(one), getComputedStyle(one, "::before")];
      return one.closest("svg") ? [style.fill, style.stroke] : [style.color, style.backgroundColor, mark.content === "none" ? "" : mark.backgroundColor];
    };
    return [...document.querySelectorAll("body *")].filter(visible).filter((one) => colors(one).some((color) => color && color !== "none" && rgb(color).join() === bad))
      .filter((one) => one.tagName !== "g").map(short);
  };
})();
