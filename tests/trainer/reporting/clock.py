"""A clock for tests of measured times."""


class Clock:
    """A clock that moves only in `tick`."""

    now = 100.0

    def __call__(self):
        return self.now

    def tick(self, seconds):
        self.now += seconds
