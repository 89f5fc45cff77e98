// The chain: the runtime, with slots, commitment, blockhashes that expire, and a history
// that can be rolled back.
import { createHash } from 'node:crypto'
import { createRequire } from 'node:module'
import { read } from './balances.js'
import { RPCError, errorJSON, lands } from './errors.js'
import { parse, toBase58 } from './wire.js'

const { LiteSvm } = createRequire(import.meta.url)('litesvm-linux-x64-gnu')

const firstSlot = 1000n
const slotMilliseconds = 400n
const hashSlots = 150n // a blockhash serves this many slots, then the next one
const lag = { processed: 0n, confirmed: 1n, finalized: 32n }
const keptSnapshots = 64

export class Chain {
  constructor () {
    this.svm = new LiteSvm()
    this.svm.withNativeMints()
    this.slot = firstSlot
    this.startTime = BigInt(Date.now()) / 1000n
    this.transactions = new Map() // signature in base58 → record, in the order of landing
    this.snapshots = [] // {slot, state}: the state before the first change in the slot
    this.genesis = toBase58(createHash('sha256').update('kvasird local chain').digest())
    this.#setClock()
  }

  #setClock () {
    this.svm.warpToSlot(this.slot)
    const clock = this.svm.getClock()
    clock.unixTimestamp = this.blockTime(this.slot)
    this.svm.setClock(clock)
  }

  blockTime (slot) { return this.startTime + (slot - firstSlot) * slotMilliseconds / 1000n }

  slotAt (commitment = 'finalized') {
    if (!(commitment in lag)) throw new RPCError(-32602, `Invalid params: commitment ${commitment}`)
    return this.slot - lag[commitment]
  }

  commitmentOf (slot) {
    return ['finalized', 'confirmed', 'processed'].find((c) => slot <= this.slotAt(c))
  }

  advance (slots) {
    const before = this.slot / hashSlots
    this.slot += BigInt(slots)
    if (this.slot / hashSlots !== before) this.svm.expireBlockhash()
    this.#setClock()
  }

  lastValidBlockHeight () { return (this.slot / hashSlots + 1n) * hashSlots - 1n }

  // beforeChange keeps the state for a rollback, once a slot. It is kept as of slot 0,
  // since programs count as deployed in the slot of the state that they are read from,
  // and can be run in later ones only.
  beforeChange () {
    if (this.snapshots.at(-1)?.slot === this.slot) return
    this.svm.warpToSlot(0n)
    this.snapshots.push({ slot: this.slot, state: this.svm.toBytes() })
    this.#setClock()
    if (this.snapshots.length > keptSnapshots) this.snapshots.shift()
  }

  // rollback undoes all that came after a slot, as when the cluster leaves a fork: the
  // chain is at that slot again.
  rollback (slot) {
    slot = BigInt(slot)
    const later = this.snapshots.findIndex((s) => s.slot > slot)
    if (slot > this.slot) throw new RPCError(-32602, `slot ${slot} is not there yet`)
    if (later >= 0) {
      this.svm = LiteSvm.fromBytes(this.snapshots[later].state)
      this.snapshots.length = later
    }
    for (const [signature, t] of this.transactions) {
      if (t.slot > slot) this.transactions.delete(signature)
    }
    this.slot = slot
    this.#setClock()
  }

  // keysOf gives all keys of a transaction: its own, then those that it looks up, first
  // the writable ones of all tables.
  keysOf (tx) {
    const loaded = { writable: [], readonly: [] }
    for (const { table, writable, readonly } of tx.lookups) {
      const data = Buffer.from(this.svm.getAccount(table)?.data() ?? [])
      const at = (i) => data.subarray(56 + 32 * i, 88 + 32 * i)
      loaded.writable.push(...writable.map(at))
      loaded.readonly.push(...readonly.map(at))
    }
    return { keys: [...tx.keys, ...loaded.writable, ...loaded.readonly], loaded }
  }

  // simulate gives {err, logs, units} without a change.
  simulate (bytes) {
    const r = this.svm.simulateVersionedTransaction(bytes)
    const err = r.constructor.name === 'FailedTransactionMetadata' ? errorJSON(r.err()) : null
    return { err, logs: r.meta().logs(), units: r.meta().computeUnitsConsumed() }
  }

  // send runs a transaction and gives its signature. With preflight an error is the
  // caller's; without, a transaction that fails lands, or is dropped without a word.
  send (bytes, preflight) {
    let tx
    try {
      tx = parse(bytes)
    } catch (e) {
      throw new RPCError(-32602, `failed to deserialize transaction: ${e.message}`)
    }
    const sim = this.simulate(bytes)
    if (sim.err === 'SignatureFailure') throw new RPCError(-32003, 'Transaction signature verification failure')
    if (preflight && sim.err !== null) {
      throw new RPCError(-32002, `Transaction simulation failed: ${JSON.stringify(sim.err)}`,
        { err: sim.err, logs: sim.logs, unitsConsumed: Number(sim.units) })
    }
    const signature = toBase58(tx.signatures[0])
    if (this.transactions.has(signature)) return signature
    const { keys, loaded } = this.keysOf(tx)
    const programs = new Set(tx.instructions.map((i) => i.program))
    const before = read(this.svm, keys, programs)
    this.beforeChange()
    const result = this.svm.sendVersionedTransaction(bytes)
    const err = result.constructor.name === 'FailedTransactionMetadata' ? errorJSON(result.err()) : null
    const done = err === null ? result : result.meta()
    if (err !== null && !lands(err)) return signature
    this.transactions.set(signature, {
      slot: this.slot,
      bytes,
      tx,
      keys: keys.map(toBase58),
      meta: this.#meta(err, done, before, read(this.svm, keys, programs), loaded)
    })
    return signature
  }

  #meta (err, done, before, after, loaded) {
    const sum = (list) => list.reduce((a, b) => a + b, 0n)
    const inner = done.innerInstructions().map((list, index) => ({
      index,
      instructions: list.map((i) => ({
        programIdIndex: i.instruction().programIdIndex(),
        accounts: [...i.instruction().accounts()],
        data: toBase58(i.instruction().data()),
        stackHeight: i.stackHeight()
      }))
    }))
    return {
      err,
      status: err === null ? { Ok: null } : { Err: err },
      fee: Number(sum(before.lamports) - sum(after.lamports)),
      preBalances: before.lamports.map(Number),
      postBalances: after.lamports.map(Number),
      preTokenBalances: before.tokens,
      postTokenBalances: after.tokens,
      innerInstructions: inner.filter((i) => i.instructions.length > 0),
      logMessages: done.logs(),
      loadedAddresses: { writable: loaded.writable.map(toBase58), readonly: loaded.readonly.map(toBase58) },
      rewards: [],
      computeUnitsConsumed: Number(done.computeUnitsConsumed())
    }
  }
}
