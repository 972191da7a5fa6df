// Looks at every slide of 1280 x 720, and leaves [number, what is wrong] for each fault in the document.
addEventListener("load", () => setTimeout(() => {
  const wrong = [], say = (at, text) => wrong.push([at + 1, text]);
  for (let at = 0; at < Reveal.getTotalSlides(); at++) {
    Reveal.slide(at);
    const slide = Reveal.getCurrentSlide().querySelector(".slide");
    for (const details of slide.querySelectorAll("details")) details.open = false;
    const over = slide.scrollHeight - slide.clientHeight;
    if (over > 1) say(at, `${over} px of it lie below the screen`);
    for (const part of slide.querySelectorAll("pre, table, .words, .figure, h2, math")) {
      if (part.scrollWidth > slide.clientWidth + 1 || part.scrollWidth > part.clientWidth + 1 && part.clientWidth)
        say(at, `a ${part.tagName.toLowerCase()} is ${part.scrollWidth} px wide, and cut`);
    }
    for (const text of slide.querySelectorAll("pre")) {
      const size = parseFloat(getComputedStyle(text).fontSize);
      if (size < 16) say(at, `its letters are ${size} px high: too small for the last row`);
    }
    for (const picture of slide.querySelectorAll(".figure > img, .animation img")) {
      const share = picture.naturalWidth / picture.naturalHeight, box = picture.closest(".animation") ? picture : picture.parentElement;
      const wide = Math.min(box.clientWidth, box.clientHeight * share), high = wide / share;
      if (wide < 0.7 * slide.clientWidth && high < 0.6 * slide.clientHeight)
        say(at, `its figure is ${Math.round(wide)} x ${Math.round(high)} px: too small for the last row`);
    }
  }
  document.documentElement.dataset.probe = JSON.stringify(wrong);
}, 300));
