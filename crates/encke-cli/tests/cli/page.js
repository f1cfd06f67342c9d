(() => {
  const problems = [];
  const shown = element => element.getClientRects().length > 0;
  const charts = [...document.querySelectorAll("svg")].filter(shown);
  const name = element => element.textContent.slice(0, 40);
  for (const chart of charts) {
    const box = chart.getBoundingClientRect();
    const label = chart.getAttribute("aria-label");
    if (box.width < 100 || box.height < 50) problems.push(`${label}: ${box.width} x ${box.height}`);
    const marks = chart.querySelectorAll("rect, path, circle");
    if (marks.length === 0) problems.push(`${label}: no marks`);
    const texts = [...chart.querySelectorAll("text")]
      .map(text => [text, text.getBoundingClientRect()]);
    texts.forEach(([text, one], index) => {
      if (one.width === 0) problems.push(`${label}: "${name(text)}" has no size`);
      if (one.left < box.left - 1 || one.right > box.right + 1
        || one.top < box.top - 1 || one.bottom > box.bottom + 1)
        problems.push(`${label}: "${name(text)}" leaves its chart`);
      for (const [other, two] of texts.slice(index + 1)) {
        const wide = Math.min(one.right, two.right) - Math.max(one.left, two.left);
        const high = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
        if (wide > 1 && high > 3) problems.push(`${label}: "${name(text)}" meets "${name(other)}"`);
      }
      for (const mark of chart.querySelectorAll("rect.mark")) {
        const two = mark.getBoundingClientRect();
        const wide = Math.min(one.right, two.right) - Math.max(one.left, two.left);
        const high = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
        if (wide > 1 && high > 3) problems.push(`${label}: "${name(text)}" lies on a mark`);
      }
    });
  }
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) problems.push(`the page is ${width} wide`);
  const light = color => {
    const [r, g, b] = color.match(/[\d.]+/g).slice(0, 3).map(c => c / 255)
      .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = getComputedStyle(document.querySelector("section")).backgroundColor;
  for (const text of document.querySelectorAll("h2, .lead, .legend li, svg text, dd, dt")) {
    if (!shown(text)) continue;
    const style = getComputedStyle(text);
    const ink = light(text.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [high, low] = [Math.max(ink, light(ground)), Math.min(ink, light(ground))];
    if ((high + 0.05) / (low + 0.05) < 4.5) problems.push(`"${name(text)}" is hard to read`);
  }
  const marks = [...charts[0].querySelectorAll("rect.mark")]
    .map(mark => mark.getBoundingClientRect());
  const mark = marks.reduce((one, two) => one.height < two.height ? two : one);
  return {
    problems: [...new Set(problems)].slice(0, 30),
    charts: charts.length,
    sections: document.querySelectorAll("section").length,
    light: light(ground) > 0.5,
    mark: [mark.left + mark.width / 2, mark.top + mark.height / 2],
  };
})()
