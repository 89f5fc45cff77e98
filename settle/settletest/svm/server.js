// A local Solana for tests: JSON-RPC over HTTP on 127.0.0.1, one chain in memory. It
// writes "READY port" and ends when its standard input ends.
//
//   node server.js [slot milliseconds]     the chain advances by itself, or by
//                                          harness_advance only
//
// Every path is an endpoint of the same chain, so that tests have providers that differ
// by their faults.
import http from 'node:http'
import { Chain } from './chain.js'
import { RPCError } from './errors.js'
import { methods } from './methods.js'

const bodyLimit = 1 << 20
const chain = new Chain()

// faults are {path, method, first, times, and what happens: http {status, body}, error
// {code, message}, result, delay (ms), drop}. An absent path or method is any; first is
// the first parameter. One with times wears off.
let faults = []

function faultOf (path, method, params) {
  const f = faults.find((f) => f.times !== 0 && (f.path ?? path) === path && (f.method ?? method) === method &&
    (f.first === undefined || f.first === params[0]))
  if (f?.times > 0) f.times--
  return f
}

const control = {
  harness_fault: ([fault]) => { faults.unshift(fault); return true },
  harness_clearFaults: () => { faults = []; return true }
}

function call (method, params) {
  if (method in control) return control[method](params)
  if (!Object.hasOwn(methods, method)) throw new RPCError(-32601, `Method not found: ${method}`)
  return methods[method](chain, params)
}

function answer (request, fault) {
  const reply = { jsonrpc: '2.0', id: request.id ?? null }
  try {
    if (fault?.error) throw new RPCError(fault.error.code, fault.error.message)
    reply.result = fault?.result !== undefined ? fault.result : call(request.method, request.params ?? [])
  } catch (e) {
    reply.error = e instanceof RPCError
      ? { code: e.code, message: e.message, data: e.data }
      : { code: -32603, message: `Internal error: ${e.stack}` }
  }
  return JSON.stringify(reply)
}

function serve (path, body, res) {
  const send = (status, text) => res.writeHead(status, { 'content-type': 'application/json' }).end(text)
  let request
  try {
    request = JSON.parse(body)
  } catch {
    return send(200, '{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"Parse error"}}')
  }
  const fault = request.method?.startsWith('harness_') ? undefined : faultOf(path, request.method, request.params ?? [])
  if (fault?.drop) return res.destroy()
  if (fault?.http) return send(fault.http.status, fault.http.body)
  setTimeout(() => send(200, answer(request, fault)), fault?.delay ?? 0)
}

const server = http.createServer((req, res) => {
  const chunks = []
  let size = 0
  req.on('data', (chunk) => {
    size += chunk.length
    if (size > bodyLimit) return req.destroy()
    chunks.push(chunk)
  })
  req.on('end', () => serve(new URL(req.url, 'http://127.0.0.1').pathname, Buffer.concat(chunks).toString(), res))
})
server.listen(0, '127.0.0.1', () => console.log(`READY ${server.address().port}`))

const every = Number(process.argv[2] ?? 0)
if (every > 0) setInterval(() => chain.advance(1), every)
process.stdin.on('end', () => process.exit(0)).resume()
