"""A page open in a real browser, and what is asked of every page there."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CUT_AND_COVERED = """
() => [...document.querySelectorAll("figure svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].filter((text) => text.textContent);
  const boxes = texts.map((text) => text.getBoundingClientRect());
  const outer = svg.getBoundingClientRect();
  const where = (i) => svg.closest("figure").id + ": " + texts[i].textContent;
  const found = [];
  boxes.forEach((a, i) => {
    if (a.left < outer.left - 1 || a.right > outer.right + 1 || a.top < outer.top - 1
        || a.bottom > outer.bottom + 1) found.push("cut: " + where(i));
    boxes.slice(i + 1).forEach((b, j) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 1) found.push("covered: " + where(i) + " and " + where(i + 1 + j));
    });
  });
  return found;
})
"""
SIDEWAYS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Visit:
    """An open page without network, and everything it complained about or asked for."""

    def __init__(self, browser: "Browser", address: str, width: int = 1280, **settings: Any):
        viewport: Any = {"width": width, "height": 844}
        self.context = browser.new_context(viewport=viewport, offline=True, **settings)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda message: self.complaints.append(f"{message.type}: {message.text}")
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def __enter__(self) -> "Page":
        return self.page

    def __exit__(self, failed: object, *_: object) -> None:
        self.context.close()
        if not failed:
            assert self.complaints == []
            outside = [url for url in self.requests if not url.startswith(("file:", "data:"))]
            assert outside == []
