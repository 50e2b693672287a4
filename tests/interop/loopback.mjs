// Loaded before a server for Node: it listens on a free port of this machine, wherever it meant to, and prints where.

import { Server } from 'node:net';

const listen = Server.prototype.listen;

Server.prototype.listen = function (port, ...rest) {
    this.once('listening', () => console.log(`http://127.0.0.1:${this.address().port}`));
    return listen.call(this, { port: 0, host: '127.0.0.1' }, ...rest);
};
