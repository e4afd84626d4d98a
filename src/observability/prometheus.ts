/**
 * Prometheus text from the OpenTelemetry instruments, on request: no server and no timer of its
 * own.
 */
import { PrometheusSerializer } from '@opentelemetry/exporter-prometheus';
import { AggregationTemporality, AggregationType, MetricReader } from '@opentelemetry/sdk-metrics';

export const PROMETHEUS_CONTENT_TYPE = 'text/plain; version=0.0.4; charset=utf-8';

export class PrometheusReader extends MetricReader {
  readonly #serializer = new PrometheusSerializer('', false, undefined, false, true);

  constructor() {
    super({
      aggregationSelector: () => ({ type: AggregationType.DEFAULT }),
      aggregationTemporalitySelector: () => AggregationTemporality.CUMULATIVE,
    });
  }

  /** Everything as of now. An observable that throws is left out; the rest is still rendered. */
  async render(): Promise<string> {
    const { resourceMetrics, errors } = await this.collect();
    const text = this.#serializer.serialize(resourceMetrics);
    const failed = errors.map((error) => `# not collected: ${String(error).split('\n')[0]}\n`);
    return text + failed.join('');
  }

  protected override onShutdown(): Promise<void> {
    return Promise.resolve();
  }

  protected override onForceFlush(): Promise<void> {
    return Promise.resolve();
  }
}
