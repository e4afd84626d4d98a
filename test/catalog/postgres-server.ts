/** The PostgreSQL that tests use. */
export interface PostgresServer {
  readonly available: boolean;
  readonly reason: string;
  readonly newDatabase: () => Promise<string>;
}

export function postgresServer(): PostgresServer {
  return {
    available: false,
    reason: 'not started',
    newDatabase: () => Promise.reject(new Error('no PostgreSQL')),
  };
}
