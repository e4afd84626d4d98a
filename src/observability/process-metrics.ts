/** What the process itself costs: memory, descriptors, and how late its event loop runs. */
import { readdirSync } from 'node:fs';
import { monitorEventLoopDelay } from 'node:perf_hooks';
import type { MeterProvider } from '@opentelemetry/api';

/** Starts measuring. The returned function stops it. */
export function observeProcess(provider: MeterProvider): () => void {
  const meter = provider.getMeter('varve');
  const delay = monitorEventLoopDelay({ resolution: 10 });
  delay.enable();
  meter
    .createObservableGauge('process_resident_memory_bytes', { description: 'Resident memory.' })
    .addCallback((result) => result.observe(process.memoryUsage.rss()));
  meter
    .createObservableGauge('process_open_fds', { description: 'Open file descriptors.' })
    .addCallback((result) => result.observe(readdirSync('/proc/self/fd').length));
  meter
    .createObservableGauge('varve_event_loop_delay_seconds', {
      description: 'How late the event loop ran since the last collection, 99th percentile.',
    })
    .addCallback((result) => {
      // Nothing was sampled yet: NaN would not be a number to every scraper.
      const late = delay.count === 0 ? 0 : delay.percentile(99) / 1e9;
      result.observe(late);
      delay.reset();
    });
  return () => delay.disable();
}
