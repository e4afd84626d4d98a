/**
 * Two points in a test where one task waits for another: what makes a race happen the same way each
 * time.
 */
export interface Barrier {
  /** Resolves when the task inside has arrived. */
  readonly arrived: Promise<void>;
  /** Called by the task: says that it is there, and waits to be let go on. */
  pass(): Promise<void>;
  open(): void;
}

export function barrier(): Barrier {
  let arrive: () => void = () => undefined;
  let open: () => void = () => undefined;
  const arrived = new Promise<void>((resolve) => {
    arrive = resolve;
  });
  const opened = new Promise<void>((resolve) => {
    open = resolve;
  });
  return {
    arrived,
    pass: async () => {
      arrive();
      await opened;
    },
    open: () => open(),
  };
}
